// The native CPU kernels behind hf_mxfp4: one table of functions for each instruction set, chosen at run time.
//
// Each isa_*.cpp compiles the same sources (*.inc) with the flags of one instruction set (setup.py) and fills one table.
// Nothing in those files may be inline code shared with others (no STL): a linker that keeps one copy of a weak function
// could keep the one that the processor at hand cannot run.
//
// E experts, N output features (rows), K input features (columns), n tokens of one expert. A row of packed weights is
// K / 2 bytes of E2M1 codes (column 2j in the low half of byte j) and K / 32 bytes of E8M0 scales (value 2^(s - 127)).
#pragma once
#include <stdint.h>

namespace mxfp4 {

enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum ScaleRule { kMse = 0, kEven = 1, kFloor = 2, kRceil = 3 };
enum Ties { kTiesEven = 0, kTiesZero = 1, kTiesAway = 2 };
// What activations may be rounded to before they are multiplied.
enum Operand { kOperandFloat32 = 0, kOperandBFloat16 = 1, kOperandInt8 = 2, kOperands = 3 };

constexpr int64_t kGroup = 32;    // weights that share a scale
constexpr int64_t kChunk = 128;   // columns that activations are rearranged within
constexpr int64_t kPanelRows = 24;  // rows that are decoded together when many tokens are multiplied by them

// Packed weights of one expert from one row on.
struct Rows {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t columns;  // K
};

// What comes between the two projections. With g = min(gate, gate_max) and u = clamp(up, -up_max, up_max):
//   h = min(act(g), act_max) * (cap(u, up_cap) + up_add)      cap(v, c) = c * tanh(v / c), or v where c is 0
// where act is, by kind: 0 cap(g, gate_cap) * sigmoid(alpha * g); 1 GELU by erf; 2 GELU by tanh; 3 relu(g)^2; 4 relu(g).
// Without a gate, h = min(act(g), act_max) of the one input.
struct Activation {
  int32_t kind, gated, interleaved;
  float alpha, gate_max, act_max, up_max, gate_cap, up_cap, up_add;
};

// Activations in the form that one kernel takes them in: prepared once a token, chunk by chunk, zeros past the last
// column. Prepared tokens stand `x_stride` bytes apart.
struct Kernel {
  int64_t chunk_bytes;

  // Prepares `columns` (from the start of a chunk) of one token.
  void (*prepare)(const void* x, int dtype, int64_t columns, void* prepared);

  // out[t * out_stride + r] = sum over k of W[r, k] * x[t, k], for kMostRows rows at most. `scratch` has
  // scratch_bytes(w.columns).
  void (*multiply)(const Rows& w, int64_t rows, const void* x, int64_t x_stride, int64_t tokens, float* out,
                   int64_t out_stride, void* scratch);
};

// One instruction set's kernels.
struct Kernels {
  const char* name;
  bool (*usable)();
  Kernel operands[kOperands];

  // out[t * out_stride + k] = sum over r of g[t * g_stride + r] * W[r, k], for at most kTransposedTokens tokens and
  // kTransposedColumns columns, from the start of a chunk. g is rounded to what `operand` says.
  void (*multiply_transposed)(const Rows& w, int64_t rows, int64_t columns, const float* g, int64_t g_stride,
                              int64_t tokens, int operand, float* out, int64_t out_stride, void* scratch);

  // h[t * h_stride + i] from `width` outputs of the first projection, biases added: gate_up[t * stride + ...], gate and
  // up in turn if interleaved, otherwise up `width` after gate.
  void (*activate)(const Activation& a, const float* gate_up, int64_t stride, int64_t tokens, int64_t width, float* h,
                   int64_t h_stride);

  // values[t * stride + i] += bias[i]
  void (*add_bias)(float* values, int64_t stride, int64_t tokens, int64_t width, const void* bias, int dtype);

  // out[i] = sum over j of weights[j] * rows[j][i], j in order; rows may be null.
  void (*combine)(const float* const* rows, const float* weights, int64_t count, int64_t width, void* out, int dtype);

  // Rounds `blocks` groups of 32 contiguous weights of a dtype to MXFP4: 16 bytes of codes and a scale byte each.
  // Returns the index of the first weight that is not finite, or -1. What is written then is not defined.
  int64_t (*quantize)(const void* weights, int dtype, int64_t blocks, int rule, int ties, uint8_t* codes, uint8_t* scales);

  // Reads `bytes` (a multiple of 4096) once, as fast as one thread can; returns a sum, so that nothing is left out.
  uint64_t (*probe_read)(const uint8_t* data, int64_t bytes);

  // Multiplies and adds in registers only, in the widest form that the matrix kernels use; returns how many
  // floating-point operations (a multiply and an add are two) were done in `rounds` rounds.
  int64_t (*probe_multiply)(int64_t rounds, float* sink);
};

constexpr int64_t kTransposedColumns = 1024, kTransposedTokens = 64;
constexpr int64_t kTransposedRows = 64;  // decoded at a time

// The same weights from row r on.
static inline Rows from_row(const Rows& w, int64_t r) {
  return {w.codes + r * (w.columns / 2), w.scales + r * (w.columns / kGroup), w.columns};
}

static inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

constexpr int64_t kMostRows = 256;  // of one call of `multiply`

// Bytes of scratch that a thread needs for `multiply` and `multiply_transposed` of weights K wide: a panel of decoded
// rows in float32 and factors for their scales; factors for the scales of kMostRows rows, 16 bits each; or a panel of the
// transposed product, tokens' gradients and sums.
static inline int64_t scratch_bytes(int64_t columns) {
  const int64_t panel = kPanelRows * (round_up(columns, kChunk) + 64 + columns / kGroup + 64) * 4;
  const int64_t factors = kMostRows * (columns / kGroup + 64) * 2;
  const int64_t transposed = (kTransposedRows + kTransposedTokens) * (kTransposedColumns + 64) * 4 +
                             kTransposedTokens * kTransposedRows * 4;
  const int64_t forward = panel > factors ? panel : factors;
  return round_up(forward > transposed ? forward : transposed, 64);
}

extern const Kernels kAvx512Bf16, kAvx512, kAvx2, kNeon, kScalar;

}  // namespace mxfp4
