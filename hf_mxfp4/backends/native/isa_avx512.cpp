// AVX-512 without BF16: Skylake-X, Cascade Lake, Ice Lake. bfloat16 activations are multiplied in float32.
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <float.h>
#include <math.h>
#include <string.h>

#define MXFP4_VECTOR_BYTES 64
#define MXFP4_ISA_AVX512
namespace mxfp4 {
namespace {
#include "common.inc"
#include "avx512.inc"
#include "float32.inc"
#include "probe.inc"
#include "quantize.inc"
#include "table.inc"

bool usable() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
}  // namespace

const Kernels kAvx512 =
    table("avx512", usable, {kChunk * 4, prepare_float32, multiply_float32},
          {kChunk * 4, prepare_int8, multiply_float32}, multiply_transposed_float32);
}  // namespace mxfp4
#endif
