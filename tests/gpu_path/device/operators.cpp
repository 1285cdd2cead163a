// Every aten operator that has a kernel for CUDA computes on the CPU, over the same memory. Loaded after torch, in a
// process that runs on the emulated device. All else is torch's own: autograd and its device threads, streams, events,
// the caching allocator, ProcessGroupNCCL, copies between host and device, and the sync debug mode.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/cuda/Resize.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>

#include "aliases.h"
#include "kernels.h"

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

extern "C" {  // runtime.cpp
void emulated_cuda_launch(void *stream, const char *name, void (*run)(void *), void (*free)(void *), void *argument);
cudaError_t emulated_cuda_drain(void *stream);
int emulated_cuda_defers(void *stream);
int emulated_cuda_captures(void *stream);
void emulated_cuda_count_launch();
}

namespace device {
namespace {

// On a GPU the host waits for these, to learn the size of their result.
const std::set<std::string> WAITING = {
    "aten::nonzero",      "aten::masked_select",     "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount",     "aten::repeat_interleave", "aten::equal",    "aten::histc",      "aten::segment_reduce"};

// Memory, metadata, and one number to the host: torch's CUDA kernels for these need no computing.
const std::set<std::string> KEPT = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::_local_scalar_dense", "aten::resize_",
    "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::is_set_to", "aten::_efficientzerotensor",
    "aten::set_", "aten::resize_as_", "aten::_resize_output_"};

auto &without_cpu_kernel = *new std::vector<std::string>;

std::string full_name(const OperatorHandle &op) {
  auto &[name, overload] = op.operator_name();
  return overload.empty() ? name : name + "." + overload;
}
void *current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
bool is_written(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

Tensor new_cuda(const Tensor &like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device).pinned_memory(false));
}

Tensor to_meta(const Tensor &t) {
  auto meta = at::empty_strided(t.sizes(), t.strides(),
                                t.options().device(c10::kMeta).pinned_memory(false).requires_grad(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// Bytes from a tensor's first element to behind its last.
size_t span(const Tensor &t) {
  if (!t.numel()) return 0;
  size_t elements = 1;
  for (int64_t dim = 0; dim < t.dim(); dim++) elements += (t.size(dim) - 1) * t.stride(dim);
  return elements * t.itemsize();
}

// change: Tensor -> Tensor, for every tensor within a value.
template <class Change>
IValue with_tensors(const IValue &value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor &t : value.toTensorList()) changed.push_back(t.defined() ? change(t) : t);
    return changed;
  }
  if (value.isList()) {  // of optional tensors
    auto list = value.toList();
    c10::impl::GenericList changed(list.elementType());
    bool any = false;
    for (size_t i = 0; i < list.size(); i++) {
      IValue element = list.get(i);
      any |= element.isTensor();
      changed.push_back(element.isTensor() ? with_tensors(element, change) : element);
    }
    return any ? IValue(changed) : value;
  }
  return value;
}

// The CUDA generator's seed and offset decide what a CPU generator draws, and the offset moves on: states that a
// program saves and restores act as on a GPU. In a graph both lie in the device's memory, written before each launch.
at::PhiloxCudaState draw(const IValue &given, c10::DeviceIndex device) {
  auto cuda = given.isGenerator() ? given.toGenerator()
                                  : at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, device));
  std::lock_guard<std::mutex> held(cuda.mutex());
  return at::check_generator<at::CUDAGeneratorImpl>(cuda)->philox_cuda_state(4);
}
at::Generator cpu_generator(const at::PhiloxCudaState &drawn) {
  uint64_t seed = drawn.captured_ ? *drawn.seed_.ptr : drawn.seed_.val;
  uint64_t offset = drawn.captured_ ? *drawn.offset_.ptr + drawn.offset_intragraph_ : drawn.offset_.val;
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset);
}

void call_kernel(const OperatorHandle &op, Stack &stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard excluded(c10::autocast_dispatch_keyset |
                                              c10::DispatchKeySet(c10::DispatchKey::Python) |
                                              c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot));
  op.callBoxed(&stack);
}

std::string described(const IValue &value) {
  std::ostringstream text;
  if (value.isList()) {
    for (const IValue &element : value.toListRef()) text << described(element) << ",";
  } else if (!value.isTensor()) {
    text << value.tagKind() << value;
  } else if (const Tensor &t = value.toTensor(); t.defined()) {
    bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
    text << t.scalar_type() << t.sizes() << t.strides() << t.device().type() << wrapped;
  }
  return text.str();
}

// What the meta kernel returns; none where it cannot tell. Many are Python, and slower than what computes the numbers:
// each is asked once for each kind of arguments.
std::optional<std::vector<Tensor>> meta_results(const OperatorHandle &op, Stack meta) {
  static auto &known = *new std::unordered_map<std::string, std::optional<std::vector<Tensor>>>;
  static std::mutex mutex;
  std::string key = full_name(op);
  for (auto &value : meta) key += "|" + described(value);
  {
    std::lock_guard<std::mutex> held(mutex);
    if (auto found = known.find(key); found != known.end()) return found->second;
  }
  std::optional<std::vector<Tensor>> results;
  try {
    call_kernel(op, meta);
    results.emplace();
    for (auto value = meta.end() - op.schema().returns().size(); value != meta.end(); value++)
      results->push_back(value->toTensor());
  } catch (const std::exception &) {
  }
  std::lock_guard<std::mutex> held(mutex);
  return known.emplace(key, results).first->second;
}

// One operator that the device runs later: its arguments on the CPU, and the memory of its new results.
struct Launch {
  std::string name;
  OperatorHandle op;
  Stack stack;
  std::vector<Tensor> results;  // undefined where an argument is the result
  std::map<size_t, at::PhiloxCudaState> drawn;  // by the argument that is a generator
};

void run(void *argument) {
  auto *launch = static_cast<Launch *>(argument);
  try {
    Stack stack = launch->stack;  // the next launch of a graph needs it again
    for (auto &[i, drawn] : launch->drawn) stack[i] = cpu_generator(drawn);
    call_kernel(launch->op, stack);
    size_t first = stack.size() - launch->results.size();
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < launch->results.size(); i++)
      if (launch->results[i].defined()) launch->results[i].copy_(stack[first + i].toTensor());
  } catch (const std::exception &error) {
    fprintf(stderr, "emulated CUDA device: %s failed: %s\n", launch->name.c_str(), error.what());
    abort();
  }
}

void push(std::unique_ptr<Launch> launch) {
  const char *name = launch->name.c_str();
  auto free = [](void *argument) { delete static_cast<Launch *>(argument); };
  emulated_cuda_launch(current_stream(), name, run, free, launch.release());
}

// One call of an operator with CUDA tensors.
class Call {
  const OperatorHandle &op_;
  const c10::FunctionSchema &schema_;
  const std::string &name_;
  std::vector<IValue> given_;
  std::vector<IValue> lowered_;  // the same for the CPU
  Aliases aliases_;
  std::map<size_t, at::PhiloxCudaState> drawn_;
  c10::Device device_;

 public:
  Call(const OperatorHandle &op, std::vector<IValue> given, c10::Device device)
      : op_(op), schema_(op.schema()), name_(op.operator_name().name), given_(std::move(given)), device_(device) {}

  void operator()(Stack *stack) {
    bool waits = host_waits();
    if (waits) c10::cuda::warn_or_error_on_sync();
    if (emulated_cuda_captures(current_stream()) && !waits) size_outputs();
    bool defers = emulated_cuda_defers(current_stream()) && !waits && can_be_deferred();
    for (size_t i = 0; i < given_.size(); i++) lowered_.push_back(lower(i, defers));
    if (defers && defer(stack)) return;
    run_now(stack);
  }

 private:
  size_t num_results() const { return schema_.returns().size(); }

  bool host_waits() const {
    if (name_ == "aten::repeat_interleave") return given_.back().isNone();  // else its output's size is given
    if (name_ == "aten::_index_put_impl_" && given_[2].toTensor().numel() == 1 && !given_[3].toBool())
      return false;  // becomes masked_fill
    bool indexes = name_ == "aten::index" || name_ == "aten::_index_put_impl_" || name_ == "aten::_unsafe_index";
    bool by_mask = false;
    if (indexes)
      with_tensors(given_[1], [&](const Tensor &t) {
        by_mask |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
        return t;
      });
    return by_mask || WAITING.count(name_);
  }

  // Not where a number or a list of new tensors is returned, nor an argument of unknown size.
  bool can_be_deferred() const {
    bool can = true;
    for (auto &result : schema_.returns()) can &= result.type()->kind() == c10::TypeKind::TensorType;
    for (size_t i = 0; i < given_.size(); i++)
      if (is_written(schema_.arguments()[i]))
        with_tensors(given_[i], [&](const Tensor &t) {
          can &= t.is_cuda() && t.numel();
          return t;
        });
    return can;
  }

  IValue lower(size_t i, bool defers) {
    const IValue &value = given_[i];
    const auto &argument = schema_.arguments()[i];
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    if (value.isGenerator() || argument.name() == "generator") {
      drawn_[i] = draw(value, device_.index());
      return IValue();
    }
    return with_tensors(value, [&](const Tensor &t) {
      if (t.is_cuda()) return aliases_(t);
      return defers && !is_written(argument) ? t.clone() : t;  // a number of the host, as a kernel's argument
    });
  }

  // The argument that result i is, or null where it is a new tensor.
  const IValue *argument_returned(size_t i) const {
    auto *info = schema_.returns()[i].alias_info();
    if (!info || !info->isWrite()) return nullptr;
    for (size_t k = 0; k < given_.size(); k++)
      if (auto *other = schema_.arguments()[k].alias_info(); other && *other == *info) return &given_[k];
    return nullptr;
  }

  Stack meta_arguments() const {
    Stack meta;
    for (auto &value : given_)
      meta.push_back(value.isDevice()      ? IValue(c10::Device(c10::kMeta))
                     : value.isGenerator() ? IValue()
                                           : with_tensors(value, [](const Tensor &t) {
                                               return t.is_cuda() ? to_meta(t) : t;
                                             }));
    return meta;
  }

  // out= tensors without elements, which a kernel would resize: before the launch, as on a GPU.
  void size_outputs() {
    auto is_empty = [&](size_t i) {
      return given_[i].isTensor() && is_written(schema_.arguments()[i]) && !given_[i].toTensor().numel();
    };
    std::vector<size_t> empty;
    for (size_t i = 0; i < given_.size(); i++)
      if (is_empty(i)) empty.push_back(i);
    if (empty.empty()) return;
    Stack arguments = meta_arguments(), called = arguments;
    try {
      call_kernel(op_, called);
    } catch (const std::exception &) {
      return;
    }
    for (size_t i : empty) given_[i].toTensor().resize_(arguments[i].toTensor().sizes());
  }

  // New tensors of the sizes that the meta kernel says; false where there is none.
  bool make_results(std::vector<Tensor> &cuda, std::vector<Tensor> &cpu) {
    auto sizes = meta_results(op_, meta_arguments());
    if (!sizes) return false;
    for (size_t i = 0; i < num_results(); i++) {
      if (argument_returned(i) || !(*sizes)[i].defined()) continue;
      cuda[i] = new_cuda((*sizes)[i], device_);
      cpu[i] = aliases_(cuda[i]);
    }
    return true;
  }

  bool defer(Stack *stack) {
    std::vector<Tensor> cuda(num_results()), cpu(num_results());
    bool any_new = false;
    for (size_t i = 0; i < num_results(); i++) any_new |= !argument_returned(i);
    if (any_new && !make_results(cuda, cpu)) return false;
    push(std::make_unique<Launch>(full_name(op_), op_, Stack(lowered_.begin(), lowered_.end()),
                                  any_new ? cpu : std::vector<Tensor>(), drawn_));
    for (size_t i = 0; i < num_results(); i++)
      stack->push_back(argument_returned(i) ? *argument_returned(i) : IValue(cuda[i]));
    return true;
  }

  void run_now(Stack *stack) {
    C10_CUDA_CHECK(emulated_cuda_drain(current_stream()));
    emulated_cuda_count_launch();
    Stack results(lowered_.begin(), lowered_.end());
    for (auto &[i, drawn] : drawn_) results[i] = cpu_generator(drawn);
    call_kernel(op_, results);
    for (size_t i = 0; i < given_.size(); i++)
      if (is_written(schema_.arguments()[i])) take_over_resized(given_[i], lowered_[i]);
    auto raise = [&](const Tensor &cpu) {
      if (Tensor view = aliases_.view_of(cpu); view.defined() || cpu.device().is_meta()) return view.defined() ? view : cpu;
      Tensor cuda = new_cuda(cpu, device_);
      if (cpu.numel()) memcpy(cuda.mutable_data_ptr(), cpu.const_data_ptr(), span(cpu));
      return cuda;
    };
    for (size_t i = 0; i < num_results(); i++)
      stack->push_back(argument_returned(i) ? *argument_returned(i)
                                            : with_tensors(results[results.size() - num_results() + i], raise));
  }

  // out= tensors that the CPU's kernel has resized.
  static void take_over_resized(const IValue &given, const IValue &lowered) {
    std::vector<Tensor> before, after;
    with_tensors(given, [&](const Tensor &t) { return before.emplace_back(t); });
    with_tensors(lowered, [&](const Tensor &t) { return after.emplace_back(t); });
    for (size_t i = 0; i < before.size(); i++) {
      const Tensor &cuda = before[i], &cpu = after[i];
      bool same = cuda.sizes() == cpu.sizes() && cuda.strides() == cpu.strides() &&
                  (!cpu.numel() || cuda.const_data_ptr() == cpu.const_data_ptr());
      if (!cuda.is_cuda() || same) continue;
      at::native::resize_bytes_cuda(cuda.storage().unsafeGetStorageImpl(),
                                    span(cpu) + cpu.storage_offset() * cpu.itemsize());
      cuda.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      if (cpu.numel()) memmove(cuda.mutable_data_ptr(), cpu.const_data_ptr(), span(cpu));
    }
  }
};

void redirect(const OperatorHandle &op, Stack *stack) {
  size_t first = stack->size() - op.schema().arguments().size();
  std::vector<IValue> given(stack->begin() + first, stack->end());
  stack->resize(first);
  c10::cuda::OptionalCUDAGuard guard;
  for (auto &value : given)
    with_tensors(value, [&](const Tensor &t) {
      if (t.is_cuda() && !guard.current_device()) guard.set_device(t.device());
      return t;
    });
  C10_CUDA_CHECK(cudaGetLastError());  // as behind each kernel's launch: what an earlier call left unread shows here
  at::AutoDispatchBelowADInplaceOrView below;
  Call(op, std::move(given), c10::Device(c10::kCUDA, c10::cuda::current_device()))(stack);
}

void refuse(const OperatorHandle &op, Stack *) {
  TORCH_CHECK(false, "emulated CUDA device: ", full_name(op), " has no CPU kernel. Write one in kernels.cpp.");
}

// Between host and device by torch's own path (pinned or pageable, streams, cudaMemcpyAsync); on the device a kernel.
Tensor &copy(Tensor &self, const Tensor &from, bool non_blocking) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  if (!self.is_cuda() || !from.is_cuda()) return at::native::copy_(self, from, non_blocking);
  if (self.is_same(from) || !self.numel()) return self;
  c10::cuda::CUDAGuard guard(self.device());
  Aliases aliases;
  push(std::make_unique<Launch>("aten::copy_", op, Stack{aliases(self), aliases(from), false}));
  return self;
}

bool returns_view(const OperatorHandle &op) {
  return std::ranges::any_of(op.schema().returns(), [](const c10::Argument &result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

void install() {
  auto library = [](c10::DispatchKey key) {  // kept for the process's life
    return new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  };
  auto *cuda = library(c10::DispatchKey::CUDA), *cpu = library(c10::DispatchKey::CPU);
  std::set<std::string> written = register_kernels(*cuda, *cpu);
  cuda->impl("copy_", TORCH_FN(copy));
  written.insert("aten::copy_");
  auto &dispatcher = c10::Dispatcher::singleton();
  for (auto &name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) || !op || !op->hasSchema()) continue;
    std::string full = full_name(*op);
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || returns_view(*op)) continue;
    if (KEPT.count(full) || KEPT.count(name.name) || written.count(full)) continue;
    if (op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      cuda->impl(full.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&redirect>());
    } else {
      without_cpu_kernel.push_back(full);
      cuda->impl(full.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&refuse>());
    }
  }
}

}  // namespace
}  // namespace device

extern "C" void emulated_cuda_install() {
  static std::once_flag once;
  std::call_once(once, device::install);
}
// One line for each operator that has a CUDA kernel and no CPU kernel.
extern "C" const char *emulated_cuda_missing() {
  static std::string lines = [] {
    std::string joined;
    for (auto &name : device::without_cpu_kernel) joined += name + "\n";
    return joined;
  }();
  return lines.c_str();
}
