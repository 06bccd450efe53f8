#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

namespace weightwire::detail {

/// Owns a file descriptor, whatever it is of, and closes it. Move-only; `-1` is none.
class descriptor {
public:
    descriptor() noexcept = default;
    /// Takes over `native`; a negative one is none.
    [[nodiscard]] static descriptor from_native(int native) noexcept {
        descriptor owner;
        owner.native_ = native;
        return owner;
    }
    descriptor(descriptor&& other) noexcept : native_{std::exchange(other.native_, -1)} {}
    descriptor& operator=(descriptor&& other) noexcept {
        if (this != &other) {
            close();
            native_ = std::exchange(other.native_, -1);
        }
        return *this;
    }
    descriptor(const descriptor&) = delete;
    descriptor& operator=(const descriptor&) = delete;
    ~descriptor() { close(); }

    [[nodiscard]] int native_handle() const noexcept { return native_; }
    [[nodiscard]] explicit operator bool() const noexcept { return native_ >= 0; }
    void close() noexcept {
        if (native_ >= 0) {
            ::close(std::exchange(native_, -1));
        }
    }

private:
    int native_ = -1;
};

/// `context`, an `error_context`, completed with the call that failed, its `errno` and the text of
/// it; a code of 0 has none. A template, because this folder knows nothing of the others.
template <class Context>
[[nodiscard]] Context with_errno(Context context, std::string_view operation, int code) {
    context.operation = operation;
    context.native_code = code;
    context.native_text = code == 0 ? "" : std::generic_category().message(code);
    return context;
}

/// Whether a call failed because no more files may be open, which says nothing about what it was to
/// open.
[[nodiscard]] constexpr bool is_out_of_descriptors(int code) noexcept {
    return code == EMFILE || code == ENFILE;
}

/// What to say then.
inline constexpr std::string_view no_descriptor_is_left =
    "no descriptor is left; raise the limit of open files (ulimit -n)";

}  // namespace weightwire::detail
