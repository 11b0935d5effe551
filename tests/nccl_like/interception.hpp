// Makes operators wait for memory that is in flight. On a GPU the stream orders them after the collective; here the memory is the host's.
//
// A boxed kernel at dispatch key BackendSelect, which every thread includes, for each operator that reads or writes memory. It is below
// autograd and below Python, so that it also sees what runs inside of __torch_dispatch__ (DTensor, functional collectives).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "device.hpp"

namespace nccl_like {

constexpr auto OUR_KEY = c10::DispatchKey::BackendSelect;

enum class Touch { NOTHING, MEMORY, EVERYTHING };

inline bool starts_with(const std::string& text, const char* what) { return text.rfind(what, 0) == 0; }

inline Touch touch_of(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  // The host needs the value, which on a GPU is a synchronization of the stream.
  static const std::set<std::string> needs_value{
      "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount"};
  if (needs_value.count(name)) return Touch::EVERYTHING;
  static const std::set<std::string> needs_shape{
      "aten::set_", "aten::detach_", "aten::record_stream", "aten::is_pinned", "aten::resize_", "aten::_resize_output_", "aten::rename_"};
  if (needs_shape.count(name) || starts_with(name, "aten::sym_") || starts_with(name, "aten::new_") || starts_with(name, "aten::is_") ||
      starts_with(name, "aten::_has_") || (name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0))
    return Touch::NOTHING;
  bool takes_tensors = false;
  for (const auto& argument : schema.arguments()) {
    if (argument.alias_info() && argument.alias_info()->isWrite()) return Touch::MEMORY;
    takes_tensors |= argument.type()->str().find("Tensor") != std::string::npos;
  }
  for (const auto& result : schema.returns())
    if (result.alias_info()) return Touch::NOTHING;  // a view
  return takes_tensors ? Touch::MEMORY : Touch::NOTHING;
}

inline void wait_for_memory(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return;
  const auto number = Device::get().user_of(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (number) wait_for_kernel(number);
}

inline void wait_for_memory(const c10::IValue& value) {
  if (value.isTensor()) {
    wait_for_memory(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef())
      if (each.isTensor()) wait_for_memory(each.toTensor());
  }
}

inline void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, OUR_KEY);
  if (!below.empty()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  // The dispatcher in Python (of torch.compile) calls with this key alone.
  c10::impl::ExcludeDispatchKeyGuard without_us(OUR_KEY);
  op.callBoxed(stack);
}

template <bool needs_value>
void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  if (Device::get().is_busy() && !is_internal_thread) {
    if (needs_value) synchronize();
    const size_t count = op.schema().arguments().size();
    for (size_t i = stack->size() - count; i < stack->size(); ++i) wait_for_memory((*stack)[i]);
  }
  redispatch(op, keys, stack);
}

// For the operators of aten whose kernels touch memory themselves; those that are made of others are seen through these.
inline void install_interception(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, "aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(OUR_KEY) || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    const Touch touch = touch_of(op->schema());
    if (touch == Touch::NOTHING) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(
        full.c_str(), touch == Touch::EVERYTHING ? torch::CppFunction::makeFromBoxedFunction<&intercept<true>>()
                                                 : torch::CppFunction::makeFromBoxedFunction<&intercept<false>>());
  }
}

}  // namespace nccl_like
