// NEON, which every 64-bit ARM processor has. bfloat16 activations are multiplied in float32.
#include "native.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <float.h>
#include <math.h>
#include <string.h>

#define MXFP4_VECTOR_BYTES 16
#define MXFP4_ISA_NEON
namespace mxfp4 {
namespace {
#include "common.inc"
#include "neon.inc"
#include "float32.inc"
#include "probe.inc"
#include "quantize.inc"
#include "table.inc"

bool usable() { return true; }
}  // namespace

const Kernels kNeon =
    table("neon", usable, {kChunk * 4, prepare_float32, multiply_float32},
          {kChunk * 4, prepare_int8, multiply_float32}, multiply_transposed_float32);
}  // namespace mxfp4
#endif
