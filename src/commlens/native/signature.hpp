// The arguments of a collective as words: equal words mean equal arguments. No tensor's data is read.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <string>
#include <vector>

#include "words.hpp"

namespace commlens {

// The positions of an op's arguments (-1: none). commlens.tap.tap.OpSpec finds them by schema.
struct OpSpec {
  std::string name;
  size_t number = 0;  // of the op
  size_t arguments = 0, results = 0;
  int process_group = -1, reduce_op = -1;
  std::vector<int> words;  // arguments other than tensors that belong to the key: root, peer, tag, splits, async
  std::vector<int> tensors, writes;
};

using Arguments = const c10::IValue*;

// The object in a boxed argument, without counting a reference where that can be avoided; null for None.
template <class Held>
Held* boxed(const c10::IValue& value) {
  if (!value.isObject()) return nullptr;
  const c10::IValue& slot = value.toObjectRef().getSlot(0);
  return slot.isCapsule() ? static_cast<Held*>(slot.toCapsule().get()) : nullptr;
}

inline void add_tensor(const at::Tensor& tensor, Words& into) {
  if (!tensor.defined()) {
    into.push_back(~0ull);
    return;
  }
  const auto layout = tensor.layout();
  const bool strided = layout == c10::Layout::Strided;
  const bool contiguous = !strided || tensor.is_contiguous();
  const auto sizes = tensor.sizes();
  const auto device = tensor.device();
  into.push_back(
      static_cast<uint64_t>(sizes.size()) << 40 | static_cast<uint64_t>(static_cast<uint8_t>(layout)) << 32 |
      static_cast<uint64_t>(static_cast<uint8_t>(tensor.scalar_type())) << 24 | static_cast<uint64_t>(static_cast<uint8_t>(device.type())) << 16 |
      static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 8 | contiguous);
  for (const auto size : sizes) into.push_back(static_cast<uint64_t>(size));
  if (!contiguous)
    for (const auto stride : tensor.strides()) into.push_back(static_cast<uint64_t>(stride));
}

inline void add_value(const c10::IValue& value, Words& into) {
  if (value.isTensor()) {
    add_tensor(value.toTensor(), into);
  } else if (value.isInt()) {
    into.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    into.push_back(value.toBool());
  } else if (value.isIntList()) {
    const auto list = value.toIntVector();
    into.push_back(list.size());
    for (const auto number : list) into.push_back(static_cast<uint64_t>(number));
  } else if (value.isList()) {
    const auto list = value.toListRef();
    into.push_back(list.size());
    for (const auto& item : list) add_value(item, into);
  } else {
    into.push_back(0x5EED0000u + static_cast<uint64_t>(value.isNone()));
  }
}

// The addresses of a call's outputs, by which the wait of a functional collective is recognised.
inline void add_pointers(const c10::IValue& value, std::vector<const void*>& into) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined() && tensor.layout() == c10::Layout::Strided && tensor.numel()) into.push_back(tensor.const_data_ptr());
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) add_pointers(item, into);
  }
}

}  // namespace commlens
