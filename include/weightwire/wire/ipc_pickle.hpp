#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/wire/ipc_handles.hpp>
#include <weightwire/wire/ipc_pickle_reader.hpp>

/// @file
/// The Python pickle in which vLLM's `ipc` backend passes its handles over HTTP (vLLM wire sections
/// 6.2, 6.7 and 6.10): written from a template, read by a walker that executes nothing.

namespace weightwire::wire {

/// What stands for one tensor in the pickle.
enum class ipc_pickle_form : std::uint8_t {
    args,               ///< the tuple of arguments: 0.22 and newer
    callable_and_args,  ///< a pair of the function and that tuple: 0.17 to 0.21
};

namespace detail {

/// Writes the pickle of one `ipc_handles`. What recurs is written once and recalled: the GPUs'
/// UUIDs, torch's names, and the bytes of handles, of which many tensors share one. That makes the
/// text of a large model a fifth as long, and saves Python its look-ups.
class ipc_pickle_writer {
public:
    explicit ipc_pickle_writer(ipc_pickle_form form) : form_{form} {}

    [[nodiscard]] std::string write(const ipc_handles& handles) {
        out_ = "\x80\x04";
        if (handles.packed) {
            entry(handles.entries.front());
        } else {
            out_ += ']';
            for (const auto& each : handles.entries) {
                entry(each);
                out_ += 'a';
            }
        }
        out_ += '.';
        return std::move(out_);
    }

private:
    void entry(const ipc_entry& entry) {
        out_ += '}';
        for (const auto& [gpu, tensor] : entry) {
            once('\x8C', gpu);
            if (form_ == ipc_pickle_form::args) {
                arguments(tensor);
            } else {
                name("torch.multiprocessing.reductions", "rebuild_cuda_tensor");
                arguments(tensor);
                out_ += '\x86';
            }
            out_ += 's';
        }
    }
    void arguments(const ipc_tensor& tensor) {
        const auto rank = tensor.extents.size();
        out_ += '(';
        name("torch", "Tensor");
        tuple(tensor.extents.begin(), rank);
        tuple(tensor.strides.begin(), rank);
        integer(tensor.element_offset);
        name("torch.storage", "TypedStorage");
        name("torch", traits_of(tensor.type).torch);
        integer(static_cast<std::uint64_t>(std::max(tensor.device, 0)));
        if (tensor.handle.empty()) {
            out_ += 'N';
        } else {
            once('C', tensor.handle);
        }
        integer(tensor.storage_bytes);
        integer(tensor.storage_offset);
        out_ += '\x89';
        once('C', tensor.ref_counter);
        integer(tensor.ref_slot);
        once('C', {reinterpret_cast<const char*>(tensor.event.data()), tensor.event.size()});
        out_ += tensor.event_sync ? '\x88' : '\x89';
        out_ += 't';
    }
    template <class Iterator>
    void tuple(Iterator at, std::size_t count) {
        if (count == 0) {
            out_ += ')';
            return;
        }
        out_ += '(';
        for (std::size_t i = 0; i < count; ++i, ++at) {
            integer(static_cast<std::uint64_t>(*at));
        }
        out_ += 't';
    }
    void integer(std::uint64_t value) {
        if (value <= std::numeric_limits<std::uint8_t>::max()) {
            little_endian('K', value, 1);
        } else if (value <= std::numeric_limits<std::uint16_t>::max()) {
            little_endian('M', value, 2);
        } else if (value <= std::numeric_limits<std::int32_t>::max()) {
            little_endian('J', value, 4);
        } else if (value <= std::numeric_limits<std::int64_t>::max()) {
            out_ += '\x8A';
            little_endian('\x08', value, 8);
        } else {
            throw usage_error{"an offset or a number of a handle is above 2^63",
                              {.phase = phase::update, .backend = "ipc"}};
        }
    }
    void little_endian(char opcode, std::uint64_t value, std::size_t width) {
        out_ += opcode;
        for (std::size_t i = 0; i < width; ++i) {
            out_ += static_cast<char>(value >> 8U * i & 0xFFU);
        }
    }
    /// The global `member` of `module`.
    void name(std::string_view module, std::string_view member) {
        if (recall('\x93', member)) {  // no two of ours have the same
            return;
        }
        text('\x8C', module);
        text('\x8C', member);
        out_ += '\x93';
        out_ += '\x94';
    }
    /// A text or bytes of at most 255.
    void once(char opcode, std::string_view value) {
        if (!recall(opcode, value)) {
            text(opcode, value);
            out_ += '\x94';
        }
    }
    void text(char opcode, std::string_view value) {
        out_ += opcode;
        out_ += static_cast<char>(value.size());
        out_ += value;
    }
    /// Writes the recall of what was written before; else remembers it: the caller writes it, and
    /// MEMOIZE.
    [[nodiscard]] bool recall(char opcode, std::string_view value) {
        key_ = opcode;
        key_ += value;
        const auto [place, is_new] = memo_.emplace(key_, static_cast<std::uint32_t>(memo_.size()));
        if (is_new) {
            return false;
        }
        const auto index = place->second;
        little_endian(index < 256 ? 'h' : 'j', index, index < 256 ? 1 : 4);
        return true;
    }

    ipc_pickle_form form_;
    std::string out_;
    std::string key_;
    std::unordered_map<std::string, std::uint32_t> memo_;
};

/// @throws usage_error what no pickle can say.
inline void require_writable(const ipc_handles& handles, ipc_pickle_form form) {
    const auto refuse = [](std::string_view text) {
        throw usage_error{text, {.phase = phase::update, .backend = "ipc"}};
    };
    if (handles.packed && handles.entries.size() != 1) {
        refuse("packed handles are exactly one entry: the buffer's");
    }
    if (handles.packed && form == ipc_pickle_form::callable_and_args) {
        refuse("releases that take pairs of function and arguments know nothing of packing");
    }
    constexpr std::size_t longest = std::numeric_limits<std::uint8_t>::max();
    for (const auto& entry : handles.entries) {
        for (const auto& [gpu, tensor] : entry) {
            if (gpu.empty() || gpu.size() > longest || tensor.ref_counter.size() > longest) {
                refuse(
                    "a GPU's UUID or a counter's name has more than 255 bytes, or the UUID has "
                    "none");
            }
            if (const auto fault = fault_of(tensor); !fault.empty()) {
                refuse("a tensor to export is wrong: " + std::string{fault});
            }
            if (traits_of(tensor.type).torch.empty()) {
                throw data_error{"torch has no dtype " + std::string{to_string(tensor.type)} +
                                     ", so vLLM cannot take this tensor",
                                 {.phase = phase::update, .backend = "ipc"}};
            }
        }
    }
}

}  // namespace detail

/// The pickle that Python loads as vLLM's `ipc_handles`, of protocol 4.
/// @throws usage_error packed with other than one entry or in the older form, or a tensor that is
/// wrong (`fault_of`). @throws data_error a dtype that torch has not.
[[nodiscard]] inline std::string pickle_of(const ipc_handles& handles, ipc_pickle_form form) {
    detail::require_writable(handles, form);
    return detail::ipc_pickle_writer{form}.write(handles);
}

/// The handles in a pickle that a peer sent: what CPython writes for them in protocols 2 to 5,
/// either form, and what `pickle_of` writes. Nothing in it is executed; time and memory are
/// linear in its length. Every tensor has been checked by `fault_of`; whether the memory is there
/// is known when it is opened.
/// @throws protocol_error anything else; names the opcode and its offset.
/// @throws unsupported_error memory of torch's expandable segments, which cannot be opened.
[[nodiscard]] inline ipc_handles ipc_handles_from_pickle(std::string_view text) {
    return detail::ipc_pickle_walker{text}.read();
}

}  // namespace weightwire::wire
