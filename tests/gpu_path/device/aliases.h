// CPU tensors over the memory of CUDA tensors. Tensors that share a storage share one here too.
#pragma once
#include <ATen/ATen.h>

#include <unordered_map>

namespace device {

class Aliases {
  std::unordered_map<c10::StorageImpl *, c10::Storage> cpu_;   // by the CUDA storage
  std::unordered_map<c10::StorageImpl *, at::Tensor> cuda_;    // by the CPU storage

 public:
  at::Tensor operator()(const at::Tensor &cuda) {
    auto *storage = cuda.storage().unsafeGetStorageImpl();
    c10::Storage &cpu = cpu_[storage];
    if (!cpu) {
      at::DataPtr data(storage->mutable_data(), c10::Device(c10::kCPU));
      cpu = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
                                                               std::move(data), at::getCPUAllocator(), true));
      cuda_[cpu.unsafeGetStorageImpl()] = cuda;
    }
    auto alias = at::detail::make_tensor<at::TensorImpl>(c10::Storage(cpu), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         cuda.dtype());
    auto *impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(cuda.sizes(), cuda.strides(), cuda.storage_offset());
    if (cuda.is_conj()) alias._set_conj(true);
    if (cuda.is_neg()) alias._set_neg(true);
    if (cuda.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return alias;
  }

  // The CUDA tensor that a CPU result is a view of, or an undefined one.
  at::Tensor view_of(const at::Tensor &cpu) const {
    auto found = cuda_.find(cpu.storage().unsafeGetStorageImpl());
    if (found == cuda_.end()) return {};
    return found->second.as_strided(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
};

}  // namespace device
