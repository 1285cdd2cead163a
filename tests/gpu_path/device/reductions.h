// Sums and other reductions of what all ranks gave, for the data types of NCCL.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace device {

// The numbers of ncclDataType_t and ncclRedOp_t (nccl.h 2.29). PRE_MUL_SUM stands for all operators made at run time.
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 };
enum Reduction { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, PRE_MUL_SUM };

size_t bytes_of(Type);

// Elements `from` to `from + length` of every rank's buffer, in the order of ranks. 16-bit floats are summed in fp32 and
// rounded once (NCCL rounds at each hop).
void reduce(const std::vector<std::string> &given, size_t from, size_t length, void *out, Type, Reduction);
void scale(const void *in, size_t length, void *out, Type, double factor);
double number_at(const void *, Type);

}  // namespace device
