// AVX-512 with BF16, VBMI and VNNI: Zen 4, Cooper Lake, Sapphire Rapids and later.
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <float.h>
#include <math.h>
#include <string.h>

#define MXFP4_VECTOR_BYTES 64
#define MXFP4_ISA_AVX512
#define MXFP4_ISA_AVX512_BF16
namespace mxfp4 {
namespace {
#include "common.inc"
#include "avx512.inc"
#include "float32.inc"
#include "bf16.inc"
#include "int8.inc"
#include "probe.inc"
#include "quantize.inc"
#include "table.inc"

bool usable() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}
}  // namespace

const Kernels kAvx512Bf16 =
    table("avx512_bf16", usable, {kChunk * 2, prepare_bf16, multiply_bf16},
          {kInt8Bytes, prepare_vnni, multiply_int8}, multiply_transposed);
}  // namespace mxfp4
#endif
