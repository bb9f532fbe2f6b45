// Reductions of collectives, element by element in the order of the ranks, so that all ranks get the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "paddle/phi/backends/device_ext.h"

namespace sim {

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bits = value != value ? 0x7FC0 : (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;  // to the nearest, ties to even
  }
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

inline size_t Width(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case COMPLEX128: return 16;
    default: return 8;
  }
}

// `part(rank)` is where the values of that rank begin. float16 and bfloat16 are added up in float32.
template <class T, class Wide, class Part>
void ReduceAs(Part part, size_t ranks, char* out, size_t count, C_CCLReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    Wide total = Wide(reinterpret_cast<const T*>(part(0))[i]);
    for (size_t rank = 1; rank < ranks; ++rank) {
      Wide one = Wide(reinterpret_cast<const T*>(part(rank))[i]);
      switch (op) {
        case MAX: total = std::max(total, one); break;
        case MIN: total = std::min(total, one); break;
        case PRODUCT: total = total * one; break;
        default: total = total + one;
      }
    }
    reinterpret_cast<T*>(out)[i] = T(op == AVG ? Wide(total / Wide(ranks)) : total);
  }
}

template <class Part>
void Reduce(C_DataType type, Part part, size_t ranks, char* out, size_t count, C_CCLReduceOp op) {
  switch (type) {
    case FLOAT32: return ReduceAs<float, float>(part, ranks, out, count, op);
    case FLOAT64: return ReduceAs<double, double>(part, ranks, out, count, op);
    case FLOAT16: return ReduceAs<_Float16, float>(part, ranks, out, count, op);
    case BFLOAT16: return ReduceAs<BFloat16, float>(part, ranks, out, count, op);
    case INT64: return ReduceAs<int64_t, int64_t>(part, ranks, out, count, op);
    case INT32: return ReduceAs<int32_t, int32_t>(part, ranks, out, count, op);
    case INT16: return ReduceAs<int16_t, int>(part, ranks, out, count, op);
    case INT8: return ReduceAs<int8_t, int>(part, ranks, out, count, op);
    case BOOL: case UINT8: return ReduceAs<uint8_t, unsigned>(part, ranks, out, count, op);
    default: throw std::runtime_error("cannot reduce this data type: " + std::to_string(type));
  }
}

}  // namespace sim
