// The C interface: experts, grouped linear layers and the quantizer, split into pieces of work that threads take in turn.
//
// Which thread does a piece makes no difference to what comes out. Every function returns 0, or a status that
// backends/cpu.py puts into words.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <vector>

#include "native.h"
#include "threads.h"

using namespace mxfp4;

namespace {

constexpr int kOutOfMemory = 1;

// Best first. setup.py leaves out what the compiler is too old for.
const Kernels* const kAll[] = {
#if defined(__x86_64__)
#if !defined(MXFP4_WITHOUT_ISA_AVX512_BF16)
    &kAvx512Bf16,
#endif
#if !defined(MXFP4_WITHOUT_ISA_AVX512)
    &kAvx512,
#endif
#if !defined(MXFP4_WITHOUT_ISA_AVX2)
    &kAvx2,
#endif
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

int64_t bytes_of(int dtype) { return dtype == kFloat32 ? 4 : 2; }

// A packed projection of all experts, as the caller has it: rows of the output features of each expert in turn.
struct Projection {
  const uint8_t* codes;
  const uint8_t* scales;
  const void* bias;  // [E, N], or null
  int64_t features, columns;
};

// One batch of tokens on its way through their experts, in four phases. A slot is one of a token's experts; slots stand
// sorted by expert.
struct Batch {
  const Kernels& kernels;
  const Kernel& kernel;
  const Activation& activation;
  const Projection &first, &second;
  const Prepared &input, &middle;
  int dtype, bias_dtype;
  int64_t top_k, experts, tokens;
  const char* x;
  const int64_t* ids;
  const float* weights;
  char* out;
  char *inputs, *middles;  // activations of each slot, before the first projection and before the second
  float* results;          // of each slot
  std::vector<int64_t> offsets, position;

  // The place of each slot; those of one expert keep their order, and those of none have no place.
  void sort() {
    offsets.assign(experts + 1, 0);
    position.assign(tokens * top_k, -1);
    for (int64_t s = 0; s < tokens * top_k; ++s)
      if ((uint64_t)ids[s] < (uint64_t)experts) ++offsets[ids[s] + 1];
    for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
    std::vector<int64_t> next(offsets.begin(), offsets.end());
    for (int64_t s = 0; s < tokens * top_k; ++s)
      if ((uint64_t)ids[s] < (uint64_t)experts) position[s] = next[ids[s]]++;
  }

  // A token is prepared once, and copied to the place of each of its experts.
  void prepare(int64_t t) const {
    const char* ready = nullptr;
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t at = position[t * top_k + j];
      if (at < 0) continue;
      char* to = inputs + at * input.stride;
      if (ready) {
        memcpy(to, ready, input.stride);
      } else {
        kernel.prepare(x + t * input.columns * bytes_of(dtype), dtype, input.columns, to);
        ready = to;
      }
    }
  }

  // `count` features of a projection from `row` on, biases added, for the slots of a piece.
  void multiply(const Projection& w, const Piece& p, int64_t row, int64_t count, const char* from, int64_t stride, float* to,
                int64_t to_stride, void* scratch) const {
    const int64_t at = p.expert * w.features + row;
    kernel.multiply(from_row({w.codes, w.scales, w.columns}, at), count, from + p.start * stride, stride, p.count, to,
                    to_stride, scratch);
    if (w.bias) kernels.add_bias(to, to_stride, p.count, count, (const char*)w.bias + at * bytes_of(bias_dtype), bias_dtype);
  }

  // A chunk of intermediate features: gate and up, the activation, and what the second projection takes.
  void project(const Piece& p, char* scratch, float* outer, float* h) const {
    const int64_t span = smaller(kChunk, middle.columns - p.first), stride = activation.gated ? 2 * span : span;
    if (activation.gated && !activation.interleaved) {
      multiply(first, p, p.first, span, inputs, input.stride, outer, stride, scratch);
      multiply(first, p, middle.columns + p.first, span, inputs, input.stride, outer + span, stride, scratch);
    } else {
      multiply(first, p, activation.gated ? 2 * p.first : p.first, stride, inputs, input.stride, outer, stride, scratch);
    }
    kernels.activate(activation, outer, stride, p.count, span, h, kChunk);
    char* to = middles + p.start * middle.stride + p.first / kChunk * kernel.chunk_bytes;
    for (int64_t t = 0; t < p.count; ++t) kernel.prepare(h + t * kChunk, kFloat32, span, to + t * middle.stride);
  }

  void give_back(const Piece& p, int64_t step, char* scratch) const {
    float* to = results + p.start * second.features + p.first;
    multiply(second, p, p.first, smaller(step, second.features - p.first), middles, middle.stride, to, second.features,
             scratch);
  }

  void mix(int64_t t, const float** chosen) const {
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t at = position[t * top_k + j];
      chosen[j] = at < 0 ? nullptr : results + at * second.features;
    }
    kernels.combine(chosen, weights + t * top_k, top_k, second.features, out + t * second.features * bytes_of(dtype), dtype);
  }
};

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
      Rows w = from_row({codes, scales, columns}, p.expert * features);
      if (forward) {
        kernel.multiply(from_row(w, p.first), smaller(step, features - p.first),
                        parts.at(tokens) + p.start * prepared.stride, prepared.stride, p.count,
                        out + p.start * features + p.first, features, mine);
      } else {
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
// are [T, H] of `dtype`; ids outside 0 to E - 1 contribute nothing. The first projection has 2 I outputs with a gate, else
// I, in the order that `activation` says; biases are null or of `bias_dtype`. `room` is the most bytes that outputs of
// single experts may take: tokens beyond that are run after the others.
EXPORT int mxfp4_experts(int isa, int threads, int operand, int dtype, const void* x, const int64_t* ids,
                         const float* weights, int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden,
                         int64_t intermediate, const Activation* activation, const uint8_t* first_codes,
                         const uint8_t* first_scales, const void* first_bias, const uint8_t* second_codes,
                         const uint8_t* second_scales, const void* second_bias, int bias_dtype, int64_t room,
                         void* out) try {
  const Kernels& kernels = *kAll[isa];
  const Kernel& kernel = kernels.operands[operand];
  const int64_t width = activation->gated ? 2 : 1, fits = room / (top_k * hidden * 4);
  const int64_t at_most = fits < 1 ? 1 : smaller(fits, tokens), slots = at_most * top_k;
  const Projection first{first_codes, first_scales, first_bias, width * intermediate, hidden};
  const Projection second{second_codes, second_scales, second_bias, hidden, intermediate};
  const Prepared input(kernel, hidden), middle(kernel, intermediate);
  const int64_t at_once = smaller(input.tokens_at_once(), middle.tokens_at_once());
  const int64_t step = hidden * intermediate > (1 << 22) ? kMostRows / 2 : kMostRows;
  const int64_t scratch = scratch_bytes(hidden > intermediate ? hidden : intermediate);
  const int64_t outer = at_once * kChunk * width * 4, per_thread = scratch + outer + at_once * kChunk * 4;
  Parts parts;
  const int64_t inputs = parts.add(slots * input.stride), middles = parts.add(slots * middle.stride),
                results = parts.add(slots * hidden * 4), work = parts.add(threads * per_thread);
  if (!parts.take()) return kOutOfMemory;
  std::vector<const float*> chosen(threads * top_k);
  Batch batch{kernels, kernel, *activation, first, second, input, middle, dtype, bias_dtype, top_k, experts, 0, nullptr,
              nullptr, nullptr, nullptr, parts.at(inputs), parts.at(middles), (float*)parts.at(results), {}, {}};
  for (int64_t from = 0; from < tokens; from += at_most) {
    batch.tokens = smaller(at_most, tokens - from);
    batch.x = (const char*)x + from * hidden * bytes_of(dtype);
    batch.out = (char*)out + from * hidden * bytes_of(dtype);
    batch.ids = ids + from * top_k;
    batch.weights = weights + from * top_k;
    batch.sort();
    const std::vector<Piece> first_pieces = split(batch.offsets.data(), experts, at_once, intermediate, kChunk);
    const std::vector<Piece> second_pieces = split(batch.offsets.data(), experts, at_once, hidden, step);
    Phase preparing(batch.tokens), projecting((int64_t)first_pieces.size()), returning((int64_t)second_pieces.size()),
        mixing(batch.tokens);
    Pool::run(threads, [&](int thread) {
      char* const mine = parts.at(work) + thread * per_thread;
      preparing.run([&](int64_t t) { batch.prepare(t); });
      projecting.run([&](int64_t i) {
        batch.project(first_pieces[i], mine, (float*)(mine + scratch), (float*)(mine + scratch + outer));
      });
      returning.run([&](int64_t i) { batch.give_back(second_pieces[i], step, mine); });
      mixing.run([&](int64_t t) { batch.mix(t, chosen.data() + thread * top_k); });
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
