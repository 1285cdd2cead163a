#include "reductions.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace device {
namespace {

class Bfloat16 {
  uint16_t bits_;

 public:
  Bfloat16(float value = 0) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits_ = std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t bits = uint32_t(bits_) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
};

template <class Sum>
Sum combine(Sum a, Sum b, Reduction reduction) {
  switch (reduction) {
    case PRODUCT: return a * b;
    case MAXIMUM: return b > a || b != b ? b : a;  // NaN wins
    case MINIMUM: return b < a || b != b ? b : a;
    default: return a + b;
  }
}

// f(T, Sum): as two null pointers that carry the types of an element and of a sum.
template <class F>
void with_type(Type type, F f) {
  switch (type) {
    case INT8: return f((int8_t *)nullptr, (int8_t *)nullptr);
    case UINT8: return f((uint8_t *)nullptr, (uint8_t *)nullptr);
    case INT32: return f((int32_t *)nullptr, (int32_t *)nullptr);
    case UINT32: return f((uint32_t *)nullptr, (uint32_t *)nullptr);
    case INT64: return f((int64_t *)nullptr, (int64_t *)nullptr);
    case UINT64: return f((uint64_t *)nullptr, (uint64_t *)nullptr);
    case FLOAT16: return f((_Float16 *)nullptr, (float *)nullptr);
    case FLOAT32: return f((float *)nullptr, (float *)nullptr);
    case FLOAT64: return f((double *)nullptr, (double *)nullptr);
    case BFLOAT16: return f((Bfloat16 *)nullptr, (float *)nullptr);
    default:
      fprintf(stderr, "emulated CUDA device: NCCL cannot reduce its data type %d\n", type);
      abort();
  }
}

}  // namespace

size_t bytes_of(Type type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

void reduce(const std::vector<std::string> &given, size_t from, size_t length, void *out, Type type,
            Reduction reduction) {
  with_type(type, [&]<class T, class Sum>(T *, Sum *) {
    std::vector<Sum> sums(length);
    for (size_t rank = 0; rank < given.size(); rank++) {
      auto *values = reinterpret_cast<const T *>(given[rank].data()) + from;
      for (size_t i = 0; i < length; i++)
        sums[i] = rank ? combine<Sum>(sums[i], values[i], reduction) : Sum(values[i]);
    }
    for (size_t i = 0; i < length; i++)
      static_cast<T *>(out)[i] = T(reduction == AVERAGE ? Sum(sums[i] / Sum(given.size())) : sums[i]);
  });
}

void scale(const void *in, size_t length, void *out, Type type, double factor) {
  with_type(type, [&]<class T, class Sum>(T *, Sum *) {
    for (size_t i = 0; i < length; i++) static_cast<T *>(out)[i] = T(Sum(static_cast<const T *>(in)[i] * factor));
  });
}

double number_at(const void *at, Type type) {
  double number = 0;
  with_type(type, [&]<class T, class Sum>(T *, Sum *) { number = Sum(*static_cast<const T *>(at)); });
  return number;
}

}  // namespace device
