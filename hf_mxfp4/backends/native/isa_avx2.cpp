// AVX2 and FMA: Haswell, Zen and later. bfloat16 activations are multiplied as 16-bit whole numbers.
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <float.h>
#include <math.h>
#include <string.h>

#define MXFP4_VECTOR_BYTES 32
#define MXFP4_ISA_AVX2
namespace mxfp4 {
namespace {
#include "common.inc"
#include "avx2.inc"
#include "float32.inc"
#include "int16.inc"
#include "probe.inc"
#include "quantize.inc"
#include "table.inc"

bool usable() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("fma");
}
}  // namespace

const Kernels kAvx2 =
    table("avx2", usable, {kChunk / kStretch * kStretchBytes, prepare_int16, multiply_int16},
          {kChunk / kStretch * kStretchBytes, prepare_int16_of_8, multiply_int16}, multiply_transposed_float32);
}  // namespace mxfp4
#endif
