// Makes operators wait for memory that is in flight. On a GPU the stream orders them after the collective; here the memory is the host's.
//
// A boxed fallback at a dispatch key that nobody else uses, included in the thread's state. It survives autograd, which carries that state
// into its threads, and redispatches with the key still included, so that the operators inside of an operator are seen as well.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <set>

#include "device.hpp"

namespace nccl_like {

constexpr auto OUR_KEY = c10::DispatchKey::TESTING_ONLY_GenericMode;

inline void intercept_in_this_thread() {
  if (!c10::impl::tls_is_dispatch_key_included(OUR_KEY)) c10::impl::tls_set_dispatch_key_included(OUR_KEY, true);
}

enum class Touch { NOTHING, MEMORY, EVERYTHING };

inline bool starts_with(const std::string& text, const char* what) { return text.rfind(what, 0) == 0; }

inline Touch touch_of(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  for (const char* prefix : {"c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::", "prim::", "profiler::"})
    if (starts_with(name, prefix)) return Touch::NOTHING;
  // The host needs the value, which on a GPU is a synchronization of the stream.
  static const std::set<std::string> needs_value{
      "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose", "aten::nonzero", "aten::masked_select",
      "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"};
  if (needs_value.count(name)) return Touch::EVERYTHING;
  // Python code reads the memory next: .cpu(), .tolist(), .numpy(). These return a view if there is nothing to copy.
  if (name == "aten::to" || name == "aten::resolve_conj" || name == "aten::resolve_neg") return Touch::MEMORY;
  if (name == "aten::is_pinned" || name == "aten::record_stream" || name == "aten::set_" || name == "aten::detach_" ||
      name == "aten::requires_grad_" || name == "aten::retain_grad" || name == "aten::_backward" || name == "aten::set_data" ||
      name == "aten::data" || name == "aten::size" || name == "aten::stride" || name == "aten::numel" || name == "aten::dim" ||
      starts_with(name, "aten::sym_") || starts_with(name, "aten::new_") || starts_with(name, "aten::is_") || starts_with(name, "aten::_version") ||
      (name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0))
    return Touch::NOTHING;
  for (const auto& argument : schema.arguments())
    if (argument.alias_info() && argument.alias_info()->isWrite()) return Touch::MEMORY;
  for (const auto& result : schema.returns())
    if (result.alias_info()) return Touch::NOTHING;  // a view
  return Touch::MEMORY;
}

inline Touch touch_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Touch> known;
  const auto* schema = &op.schema();
  const auto found = known.find(schema);
  if (found != known.end()) return found->second;
  return known[schema] = touch_of(*schema);
}

inline void wait_for_memory(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return;
  const auto number = Device::get().user_of(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (number) wait_for_kernel(number);
}

inline void wait_for_memory(const c10::IValue& value) {
  if (value.isTensor()) {
    wait_for_memory(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) wait_for_memory(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef())
      if (each.isTensor()) wait_for_memory(each.toTensor());
  }
}

inline void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  if (Device::get().is_busy()) {
    const Touch touch = touch_of(op);
    if (touch == Touch::EVERYTHING) synchronize();
    if (touch != Touch::NOTHING) {
      const size_t count = op.schema().arguments().size();
      for (size_t i = stack->size() - count; i < stack->size(); ++i) wait_for_memory((*stack)[i]);
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, OUR_KEY), stack);
}

}  // namespace nccl_like
