// Threads that share the work of a call: a pool that sleeps when there is none.
//
// Nobody waits for a thread that has not come: work is taken piece by piece, and a phase is over when its pieces are done,
// whoever did them. On a processor that is busy with other things a thread may come milliseconds late; then the others
// have done its part. Waiting for pieces that others still work on is a short spin and then sleep (futex(2)).
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

namespace mxfp4 {

// A number that threads sleep on until it changes.
class Signal {
 public:
  explicit Signal(uint32_t value) : value_(value) {}
  uint32_t get() const { return value_.load(std::memory_order_acquire); }

  // Returns once the number is not `value`.
  void wait_while(uint32_t value) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (get() != value) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    sleepers_.fetch_add(1);
    while (value_.load() == value) syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
  }

  // Adds to the number, and wakes up to `count` of those that sleep on it. Returns what it is now.
  uint32_t add(int32_t amount, int count = INT32_MAX) {
    const uint32_t now = value_.fetch_add((uint32_t)amount) + (uint32_t)amount;
    if (sleepers_.load() > 0) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
    return now;
  }

 private:
  static constexpr int kSpins = 2000;  // some 20 to 50 microseconds
  std::atomic<uint32_t> value_, sleepers_{0};
};

// Pieces of work 0 to count - 1, which threads take in turn.
class Phase {
 public:
  explicit Phase(int64_t count) : count_(count), over_(count == 0) {}

  // Does pieces while there are any, and returns once all are done.
  template <class Each>
  void run(Each each) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      each(i);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) over_.add(1);
    }
    over_.wait_while(0);
  }

 private:
  const int64_t count_;
  std::atomic<int64_t> next_{0}, done_{0};
  Signal over_;
};

class Pool {
 public:
  // Calls each(index) on the calling thread, index 0, and on up to threads - 1 others, with different indices below
  // `threads`; returns when all that have begun have ended. A second caller at the same time works alone.
  template <class Each>
  static void run(int threads, Each each) {
    Pool* const pool = threads > 1 ? current() : nullptr;
    if (!pool || !pool->use_.try_lock()) return each(0);
    pool->open(threads, [](void* context, int index) { (*(Each*)context)(index); }, &each);
    each(0);
    pool->close();
    pool->use_.unlock();
  }

 private:
  using Run = void (*)(void*, int);

  // The process's pool. A fork leaves the threads behind, so that a child starts its own.
  static Pool* current() {
    static std::atomic<Pool*> pool{nullptr};
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }); });
    Pool* found = pool.load();
    if (found) return found;
    Pool* const fresh = new Pool;  // lives as long as the process, as its threads do
    if (pool.compare_exchange_strong(found, fresh)) return fresh;
    delete fresh;
    return found;
  }

  void open(int threads, Run run, void* context) {
    {
      const std::lock_guard<std::mutex> lock(door_);
      run_ = run;
      context_ = context;
      seats_ = threads - 1;
      taken_ = 0;
    }
    for (; workers_ < threads - 1; ++workers_) {
      try {
        std::thread(&Pool::work, this, turn_.get()).detach();
      } catch (...) {
        break;  // the system gives no more threads
      }
    }
    turn_.add(1, threads - 1);
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(door_);
      run_ = nullptr;
    }
    for (uint32_t count; (count = inside_.get()) > 0;) inside_.wait_while(count);
  }

  void work(uint32_t seen) {
    for (;;) {
      turn_.wait_while(seen);
      seen = turn_.get();
      Run run = nullptr;
      void* context = nullptr;
      int index = 0;
      {
        const std::lock_guard<std::mutex> lock(door_);
        if (run_ && taken_ < seats_) {
          run = run_;
          context = context_;
          index = ++taken_;
          inside_.add(1);
        }
      }
      if (!run) continue;
      run(context, index);
      inside_.add(-1);
    }
  }

  std::mutex use_, door_;
  Run run_ = nullptr;
  void* context_ = nullptr;
  int seats_ = 0, taken_ = 0, workers_ = 0;
  Signal turn_{0}, inside_{0};
};

}  // namespace mxfp4
