// Portable C++, for any little-endian processor: the path of last resort, and what tests compare with.
#include "native.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define MXFP4_VECTOR_BYTES 16
#define MXFP4_ISA_SCALAR
namespace mxfp4 {
namespace {
#include "common.inc"
#include "scalar.inc"
#include "float32.inc"
#include "probe.inc"
#include "quantize.inc"
#include "table.inc"

bool usable() { return true; }
}  // namespace

const Kernels kScalar =
    table("scalar", usable, {kChunk * 4, prepare_float32, multiply_float32},
          {kChunk * 4, prepare_int8, multiply_float32}, multiply_transposed_float32);
}  // namespace mxfp4
