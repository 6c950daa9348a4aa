// The C interface: experts, grouped linear layers and the quantizer, split into pieces of work that threads take in turn.
//
// Which thread does a piece makes no difference to what comes out. Every function returns 0, or a status that
// backends/cpu.py puts into words.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "native.h"
#include "threads.h"

using namespace mxfp4;

namespace {

constexpr int kOutOfMemory = 1;

const Kernels* const kAll[] = {
#if defined(__x86_64__)
    &kAvx512Bf16, &kAvx512, &kAvx2,
#elif defined(__aarch64__)
    &kNeon,
#endif
    &kScalar,
};
constexpr int kCount = sizeof(kAll) / sizeof(kAll[0]);

// Memory of the calling thread for the length of a call. Fresh memory costs more than the work of a small call, so that
// up to kKept bytes are used again by the thread's next call.
constexpr int64_t kKept = 64 << 20, kPage = 2 << 20;

class Room {
 public:
  ~Room() { free(data_); }
  // `bytes` of memory, on huge pages where the system gives them; null if there is not so much.
  char* take(int64_t bytes) {
    if (bytes > size_) {
      free(data_);
      size_ = round_up(bytes, bytes < kPage ? 4096 : kPage);
      data_ = (char*)aligned_alloc(bytes < kPage ? 4096 : kPage, size_);
      if (!data_) size_ = 0;
#ifdef MADV_HUGEPAGE
      if (data_ && size_ >= kPage) madvise(data_, size_, MADV_HUGEPAGE);
#endif
    }
    return data_;
  }
  void give_back() {
    if (size_ <= kKept) return;
    free(data_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

thread_local Room room_of_thread;

// Parts of the memory of a call, one after the other, each on a cache line.
class Parts {
 public:
  int64_t add(int64_t bytes) {
    const int64_t at = total_;
    total_ += round_up(bytes, 64);
    return at;
  }
  char* take() { return data_ = room_of_thread.take(total_ + 64); }
  char* at(int64_t part) const { return data_ + part; }
  ~Parts() { room_of_thread.give_back(); }

 private:
  int64_t total_ = 0;
  char* data_ = nullptr;
};

// Rows from `start` on, `count` of them, of one expert, and the output features from `first` on that a piece is about.
struct Piece {
  int64_t expert, start, count, first;
};

static_assert(2 * kChunk <= kMostRows, "a piece of the first projection is a chunk of gates and one of ups");

// Columns K of activations as a kernel takes them. The stride is no multiple of 4 kB, which would crowd one cache set.
struct Prepared {
  const Kernel* kernel;
  int64_t columns, stride;
  Prepared(const Kernel& k, int64_t columns)
      : kernel(&k), columns(columns), stride(round_up(round_up(columns, kChunk) / kChunk * k.chunk_bytes, 128) + 64) {}
  // Tokens whose activations and sums stay in the second-level cache.
  int64_t tokens_at_once() const {
    const int64_t fits = (512 << 10) / stride;
    return fits < 24 ? 24 : fits > 256 ? 256 : fits;
  }
};

// Splits each expert's rows, offsets[e] to offsets[e + 1], into equal parts of at most `most`, and its `features` output
// features into parts of `step`.
std::vector<Piece> split(const int64_t* offsets, int64_t experts, int64_t most, int64_t features, int64_t step) {
  std::vector<Piece> pieces;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = offsets[e + 1] - offsets[e], parts = (count + most - 1) / most;
    for (int64_t p = 0, start = offsets[e]; p < parts; ++p) {
      const int64_t share = count / parts + (p < count % parts);
      for (int64_t first = 0; first < features; first += step) pieces.push_back({e, start, share, first});
      start += share;
    }
  }
  return pieces;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

Rows expert_rows(const uint8_t* codes, const uint8_t* scales, int64_t expert, int64_t rows, int64_t columns, int64_t row) {
  return from_row({codes, scales, columns}, expert * rows + row);
}

const char* bias_at(const void* bias, int dtype, int64_t index) {
  return (const char*)bias + index * (dtype == kFloat32 ? 4 : 2);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// What backends/cpu.py checks: changes with every change of this interface.
EXPORT int mxfp4_interface() { return 1; }

EXPORT int mxfp4_count() { return kCount; }
EXPORT const char* mxfp4_name(int isa) { return kAll[isa]->name; }
EXPORT int mxfp4_usable(int isa) { return kAll[isa]->usable(); }

// out[i] = W[expert of i] x[i] for x float32 [S, K] (S = offsets[E]) and out float32 [S, N]; transposed, x is [S, N] and
// out [S, K].
EXPORT int mxfp4_grouped_linear(int isa, int threads, int operand, int transpose, const float* x, const uint8_t* codes,
                                const uint8_t* scales, const int64_t* offsets, int64_t experts, int64_t features,
                                int64_t columns, float* out) try {
  const Kernels& kernels = *kAll[isa];
  const Kernel& kernel = kernels.operands[operand];
  const int64_t slots = offsets[experts], scratch = scratch_bytes(columns);
  const Prepared prepared(kernel, columns);
  const bool forward = !transpose;
  const int64_t step = forward ? kMostRows : kTransposedColumns;
  const std::vector<Piece> pieces = split(offsets, experts, forward ? prepared.tokens_at_once() : kTransposedTokens,
                                          forward ? features : columns, step);
  Parts parts;
  const int64_t tokens = parts.add(forward ? slots * prepared.stride : 0), work = parts.add(threads * scratch);
  if (!parts.take()) return kOutOfMemory;
  Phase preparing(forward ? slots : 0), multiplying((int64_t)pieces.size());
  Pool::run(threads, [&](int thread) {
    char* mine = parts.at(work) + thread * scratch;
    preparing.run([&](int64_t i) {
      kernel.prepare(x + i * columns, kFloat32, columns, parts.at(tokens) + i * prepared.stride);
    });
    multiplying.run([&](int64_t i) {
      const Piece& p = pieces[i];
      if (forward) {
        kernel.multiply(expert_rows(codes, scales, p.expert, features, columns, p.first), smaller(step, features - p.first),
                        parts.at(tokens) + p.start * prepared.stride, prepared.stride, p.count,
                        out + p.start * features + p.first, features, mine);
      } else {
        Rows w = expert_rows(codes, scales, p.expert, features, columns, 0);
        w.codes += p.first / 2;
        w.scales += p.first / kGroup;
        kernels.multiply_transposed(w, features, smaller(step, columns - p.first), x + p.start * features, features, p.count,
                                    operand, out + p.start * columns + p.first, columns, mine);
      }
    });
  });
  return 0;
} catch (...) {
  return kOutOfMemory;
}

// Whole expert MLPs: out[t] = sum over j of weights[t, j] * down(activation(gate_up(x[t]))) of expert ids[t, j]. x and out
// are [T, H] of `dtype`; ids outside 0 to E - 1 contribute nothing. gate_up has `inner` outputs (2 I with a gate, else I),
// in the order that `activation` says; biases are null or of `bias_dtype`. `room` is the most bytes that outputs of single
// experts may take: tokens beyond that are run after the others.
EXPORT int mxfp4_experts(int isa, int threads, int operand, int dtype, const void* x, const int64_t* ids,
                         const float* weights, int64_t token_count, int64_t top_k, int64_t experts, int64_t hidden,
                         int64_t intermediate, const Activation* activation, const uint8_t* first_codes,
                         const uint8_t* first_scales, const void* first_bias, const uint8_t* second_codes,
                         const uint8_t* second_scales, const void* second_bias, int bias_dtype, int64_t room,
                         void* out) try {
  const Kernels& kernels = *kAll[isa];
  const Kernel& kernel = kernels.operands[operand];
  const int64_t size = dtype == kFloat32 ? 4 : 2, per_token = top_k * hidden * 4;
  const int64_t batch = room / per_token < 1 ? 1 : smaller(room / per_token, token_count);
  const int64_t most_slots = batch * top_k, width = activation->gated ? 2 : 1, inner = width * intermediate;
  const Prepared input(kernel, hidden), middle(kernel, intermediate);
  const int64_t at_once = smaller(input.tokens_at_once(), middle.tokens_at_once());
  const int64_t scratch = scratch_bytes(hidden > intermediate ? hidden : intermediate);
  const int64_t gate_up = at_once * kChunk * width * 4, activated = at_once * kChunk * 4;
  const int64_t per_thread = scratch + gate_up + activated;
  const int64_t second_step = hidden * intermediate > (1 << 22) ? kMostRows / 2 : kMostRows;
  Parts parts;
  const int64_t input_part = parts.add(most_slots * input.stride), middle_part = parts.add(most_slots * middle.stride),
                output_part = parts.add(most_slots * hidden * 4), work_part = parts.add(threads * per_thread);
  if (!parts.take()) return kOutOfMemory;
  char* const inputs = parts.at(input_part);
  char* const middles = parts.at(middle_part);
  char* const work = parts.at(work_part);
  float* const results = (float*)parts.at(output_part);
  std::vector<int64_t> offsets(experts + 1), fill(experts), slot_of(most_slots), position(most_slots);
  std::vector<const float*> rows(threads * top_k);

  for (int64_t from = 0; from < token_count; from += batch) {
    const int64_t tokens = smaller(batch, token_count - from);
    const int64_t* const routed = ids + from * top_k;
    // Slots sorted by expert; those of one expert keep their order.
    std::fill(offsets.begin(), offsets.end(), 0);
    for (int64_t s = 0; s < tokens * top_k; ++s)
      if ((uint64_t)routed[s] < (uint64_t)experts) ++offsets[routed[s] + 1];
    for (int64_t e = 0; e < experts; ++e) {
      offsets[e + 1] += offsets[e];
      fill[e] = offsets[e];
    }
    for (int64_t s = 0; s < tokens * top_k; ++s) {
      position[s] = (uint64_t)routed[s] < (uint64_t)experts ? fill[routed[s]]++ : -1;
      if (position[s] >= 0) slot_of[position[s]] = s;
    }
    const std::vector<Piece> first = split(offsets.data(), experts, at_once, intermediate, kChunk);
    const std::vector<Piece> second = split(offsets.data(), experts, at_once, hidden, second_step);
    Phase preparing(tokens), projecting((int64_t)first.size()), returning((int64_t)second.size()), mixing(tokens);
    Pool::run(threads, [&](int thread) {
      char* const mine = work + thread * per_thread;
      float* const outer = (float*)(mine + scratch);
      float* const h = (float*)(mine + scratch + gate_up);
      const float** const chosen = rows.data() + thread * top_k;
      // Each token is prepared once, and copied to the place of each of its experts.
      preparing.run([&](int64_t t) {
        const char* ready = nullptr;
        for (int64_t j = 0; j < top_k; ++j) {
          const int64_t at = position[t * top_k + j];
          if (at < 0) continue;
          char* to = inputs + at * input.stride;
          if (ready) {
            memcpy(to, ready, input.stride);
          } else {
            kernel.prepare((const char*)x + (from + t) * hidden * size, dtype, hidden, to);
            ready = to;
          }
        }
      });
      projecting.run([&](int64_t i) {
        const Piece& p = first[i];
        const char* tokens_in = inputs + p.start * input.stride;
        const int64_t span = smaller(kChunk, intermediate - p.first), stride = span * width;
        const auto part = [&](int64_t row, int64_t count, float* to) {
          kernel.multiply(expert_rows(first_codes, first_scales, p.expert, inner, hidden, row), count, tokens_in,
                          input.stride, p.count, to, stride, mine);
          if (first_bias)
            kernels.add_bias(to, stride, p.count, count, bias_at(first_bias, bias_dtype, p.expert * inner + row), bias_dtype);
        };
        if (activation->interleaved || !activation->gated) {
          part(p.first * width, stride, outer);
        } else {
          part(p.first, span, outer);
          part(intermediate + p.first, span, outer + span);
        }
        kernels.activate(*activation, outer, stride, p.count, span, h, kChunk);
        for (int64_t t = 0; t < p.count; ++t)
          kernel.prepare(h + t * kChunk, kFloat32, span,
                         middles + (p.start + t) * middle.stride + p.first / kChunk * kernel.chunk_bytes);
      });
      returning.run([&](int64_t i) {
        const Piece& p = second[i];
        const int64_t span = smaller(second_step, hidden - p.first);
        float* to = results + p.start * hidden + p.first;
        kernel.multiply(expert_rows(second_codes, second_scales, p.expert, hidden, intermediate, p.first), span,
                        middles + p.start * middle.stride, middle.stride, p.count, to, hidden, mine);
        if (second_bias)
          kernels.add_bias(to, hidden, p.count, span, bias_at(second_bias, bias_dtype, p.expert * hidden + p.first),
                           bias_dtype);
      });
      mixing.run([&](int64_t t) {
        for (int64_t j = 0; j < top_k; ++j) {
          const int64_t at = position[t * top_k + j];
          chosen[j] = at < 0 ? nullptr : results + at * hidden;
        }
        kernels.combine(chosen, weights + (from + t) * top_k, top_k, hidden, (char*)out + (from + t) * hidden * size, dtype);
      });
    });
  }
  return 0;
} catch (...) {
  return kOutOfMemory;
}

// Quantizes `groups` groups of 32 weights. `*bad` becomes the index of a weight that is not finite, or -1.
EXPORT int mxfp4_quantize(int isa, int threads, const void* weights, int dtype, int64_t groups, int rule, int ties,
                          uint8_t* codes, uint8_t* scales, int64_t* bad) {
  constexpr int64_t kSpan = 4096;
  const int64_t size = (dtype == kFloat32 ? 4 : 2) * kGroup;
  std::atomic<int64_t> first_bad{INT64_MAX};
  Phase rounding((groups + kSpan - 1) / kSpan);
  Pool::run(threads, [&](int) {
    rounding.run([&](int64_t i) {
      const int64_t from = i * kSpan, count = smaller(kSpan, groups - from);
      const int64_t found = kAll[isa]->quantize((const char*)weights + from * size, dtype, count, rule, ties,
                                                codes + from * kGroup / 2, scales + from);
      if (found < 0) return;
      int64_t before = first_bad.load();
      while (from * kGroup + found < before && !first_bad.compare_exchange_weak(before, from * kGroup + found)) {
      }
    });
  });
  *bad = first_bad == INT64_MAX ? -1 : first_bad.load();
  return 0;
}

// Reads `bytes` on all threads; see Kernels::probe_read.
EXPORT uint64_t mxfp4_probe_read(int isa, int threads, const uint8_t* data, int64_t bytes) {
  constexpr int64_t kSpan = 1 << 20;
  std::atomic<uint64_t> sum{0};
  Phase reading(bytes / kSpan);
  Pool::run(threads, [&](int) { reading.run([&](int64_t i) { sum += kAll[isa]->probe_read(data + i * kSpan, kSpan); }); });
  return sum;
}

// Multiplies on all threads; returns the floating-point operations done. See Kernels::probe_multiply.
EXPORT int64_t mxfp4_probe_multiply(int isa, int threads, int64_t rounds) {
  constexpr int64_t kPieces = 64;
  std::atomic<int64_t> operations{0};
  Phase multiplying(threads * kPieces);
  Pool::run(threads, [&](int) {
    multiplying.run([&](int64_t) {
      float sink;
      operations += kAll[isa]->probe_multiply(rounds / kPieces, &sink);
    });
  });
  return operations;
}
