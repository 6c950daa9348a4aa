// Runs every function of the native library through its C interface, for tests/test_build.py: `native_check IN OUT`.
//
// IN holds int64 sizes, then the arrays, as `make_input` of test_build.py writes them. OUT gets, for every instruction
// set that runs, its name in 16 bytes and what came out, in the order of `main`. Each array ends where memory ends: the
// page behind it cannot be read or written. All is done again with two threads, which must give the same bits.
// Exit status 1 is a call that failed, 2 a difference between one thread and two, and a signal is a fault.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "native.h"

extern "C" {
int mxfp4_interface();
int mxfp4_count();
const char* mxfp4_name(int isa);
int mxfp4_usable(int isa);
int mxfp4_grouped_linear(int isa, int threads, int operand, int transpose, const float* x, const uint8_t* codes,
                         const uint8_t* scales, const int64_t* offsets, int64_t experts, int64_t features,
                         int64_t columns, float* out);
int mxfp4_experts(int isa, int threads, int operand, int dtype, const void* x, const int64_t* ids, const float* weights,
                  int64_t token_count, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate,
                  const mxfp4::Activation* activation, const uint8_t* first_codes, const uint8_t* first_scales,
                  const void* first_bias, const uint8_t* second_codes, const uint8_t* second_scales,
                  const void* second_bias, int bias_dtype, int64_t room, void* out);
int mxfp4_quantize(int isa, int threads, const void* weights, int dtype, int64_t groups, int rule, int ties,
                   uint8_t* codes, uint8_t* scales, int64_t* bad);
}

namespace {

void fail(int status, const char* what) {
  fprintf(stderr, "native_check: %s\n", what);
  exit(status);
}

// `bytes` of memory, 0xFF, that end where a page begins that nobody may touch.
template <class T>
T* guarded(int64_t count) {
  const int64_t page = sysconf(_SC_PAGESIZE), bytes = count * sizeof(T), whole = (bytes + page - 1) / page * page;
  char* data = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED || mprotect(data + whole, page, PROT_NONE)) fail(1, "no memory");
  memset(data, 0xFF, whole);
  return (T*)(data + whole - bytes);
}

template <class T>
const T* read_array(FILE* file, int64_t count) {
  T* data = guarded<T>(count);
  if (count && fread(data, sizeof(T), count, file) != (size_t)count) fail(1, "IN is too short");
  return data;
}

template <class T>
void write_array(FILE* file, const T* data, int64_t count) {
  if (fwrite(data, sizeof(T), count, file) != (size_t)count) fail(1, "OUT cannot be written");
}

// Calls run(threads, out) with one thread and with two, and writes what comes out.
template <class T, class Run>
void twice(FILE* file, int64_t count, Run run) {
  T* const once = guarded<T>(count);
  T* const again = guarded<T>(count);
  if (run(1, once) || run(2, again)) fail(1, "a call failed");
  if (memcmp(once, again, count * sizeof(T))) fail(2, "two threads give other bits than one");
  write_array(file, once, count);
}

}  // namespace

int main(int argc, char** argv) {
  FILE* in = argc == 3 ? fopen(argv[1], "rb") : nullptr;
  FILE* file = in ? fopen(argv[2], "wb") : nullptr;
  if (!file) fail(1, "IN and OUT are needed");
  const int64_t* const sizes = read_array<int64_t>(in, 8);
  const int64_t experts = sizes[0], hidden = sizes[1], intermediate = sizes[2], rows = sizes[3], tokens = sizes[4],
                top_k = sizes[5], groups = sizes[6], room = sizes[7], inner = 2 * intermediate;
  const auto* first_codes = read_array<uint8_t>(in, experts * inner * hidden / 2);
  const auto* first_scales = read_array<uint8_t>(in, experts * inner * hidden / 32);
  const auto* second_codes = read_array<uint8_t>(in, experts * hidden * intermediate / 2);
  const auto* second_scales = read_array<uint8_t>(in, experts * hidden * intermediate / 32);
  const auto* offsets = read_array<int64_t>(in, experts + 1);
  const auto* x = read_array<float>(in, rows * hidden);
  const auto* g = read_array<float>(in, rows * inner);
  const auto* token = read_array<float>(in, tokens * hidden);
  const auto* ids = read_array<int64_t>(in, tokens * top_k);
  const auto* weights = read_array<float>(in, tokens * top_k);
  const auto* first_bias = read_array<float>(in, experts * inner);
  const auto* second_bias = read_array<float>(in, experts * hidden);
  const auto* dense = read_array<float>(in, groups * 32);
  uint16_t* const half = guarded<uint16_t>(tokens * hidden);  // tokens are bfloat16 numbers: the upper half has all
  uint16_t* const half_first = guarded<uint16_t>(experts * inner);
  uint16_t* const half_second = guarded<uint16_t>(experts * hidden);
  const auto halve = [](const float* from, uint16_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) memcpy(to + i, (const char*)(from + i) + 2, 2);
  };
  halve(token, half, tokens * hidden);
  halve(first_bias, half_first, experts * inner);
  halve(second_bias, half_second, experts * hidden);
  const mxfp4::Activation activation = {0, 1, 1, 1.702f, 7.f, __builtin_inff(), 7.f, 0.f, 0.f, 1.f};

  for (int isa = 0; isa < mxfp4_count(); ++isa) {
    if (!mxfp4_usable(isa)) continue;
    char name[16] = {0};
    snprintf(name, sizeof name, "%s", mxfp4_name(isa));
    write_array(file, name, sizeof name);
    for (int operand = 0; operand < 3; ++operand) {
      twice<float>(file, rows * inner, [&](int threads, float* out) {
        return mxfp4_grouped_linear(isa, threads, operand, 0, x, first_codes, first_scales, offsets, experts, inner,
                                    hidden, out);
      });
      twice<float>(file, rows * hidden, [&](int threads, float* out) {
        return mxfp4_grouped_linear(isa, threads, operand, 1, g, first_codes, first_scales, offsets, experts, inner,
                                    hidden, out);
      });
      twice<float>(file, tokens * hidden, [&](int threads, float* out) {
        return mxfp4_experts(isa, threads, operand, 0, token, ids, weights, tokens, top_k, experts, hidden, intermediate,
                             &activation, first_codes, first_scales, first_bias, second_codes, second_scales,
                             second_bias, 0, room, out);
      });
      twice<uint16_t>(file, tokens * hidden, [&](int threads, uint16_t* out) {
        return mxfp4_experts(isa, threads, operand, 1, half, ids, weights, tokens, top_k, experts, hidden, intermediate,
                             &activation, first_codes, first_scales, half_first, second_codes, second_scales,
                             half_second, 1, room, out);
      });
    }
    uint8_t* const codes = guarded<uint8_t>(groups * 16);
    twice<uint8_t>(file, groups, [&](int threads, uint8_t* scales) {
      int64_t bad = 0;
      return mxfp4_quantize(isa, threads, dense, 0, groups, 0, 0, codes, scales, &bad) || bad != -1;
    });
    write_array(file, codes, groups * 16);
  }
  return fclose(file) ? 1 : 0;
}
