// What cannot be sent to a CPU kernel of torch's: CUDA kernels without one, and fused attention.
#pragma once
#include <torch/library.h>

#include <set>
#include <string>

namespace device {

// Registers them; the operators whose CUDA kernel is now ours.
std::set<std::string> register_kernels(torch::Library &cuda, torch::Library &cpu);

}  // namespace device
