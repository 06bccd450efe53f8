#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/nvrtc.hpp>
#include <weightwire/gpu/stream.hpp>

/// @file
/// Kernels from strings: compiled once a process, loaded and launched through the runtime API
/// alone, so that a translation unit of a plain host compiler has them and nobody links the driver.

namespace weightwire::gpu {

/// How many blocks of how many threads, and how much dynamic shared memory each block has.
struct launch_shape {
    unsigned int blocks = 1;
    unsigned int threads = 1;
    std::size_t shared_bytes = 0;
};

/// A loaded kernel. A handle: the code stays loaded until the process ends.
class kernel {
public:
    explicit kernel(cudaKernel_t native) noexcept : native_{native} {}
    [[nodiscard]] cudaKernel_t native_handle() const noexcept { return native_; }

    /// Allows `bytes` of dynamic shared memory a block on the current device. Needed above 48 KiB,
    /// before the first launch there.
    void allow_shared_bytes(std::size_t bytes) const {
        check(cudaFuncSetAttribute(native_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(bytes)),
              "cudaFuncSetAttribute");
    }

    /// Loads the code onto the current device, where it is not there yet: the driver does that at
    /// the first use on each device otherwise, and may hold it up until kernels that run there have
    /// ended.
    void load_here() const {
        cudaFuncAttributes read{};
        check(cudaFuncGetAttributes(&read, native_), "cudaFuncGetAttributes");
    }

    /// Puts one launch into `on`, a stream of the current device, and returns.
    ///
    /// Each argument has exactly the type of the kernel's parameter; it is copied before this
    /// returns.
    /// @throws resource_error the launch was refused.
    template <class... Arguments>
    void launch(stream_ref on, const launch_shape& form, Arguments... arguments) const {
        std::array<void*, sizeof...(Arguments)> addresses{&arguments...};
        check(cudaLaunchKernel(native_, dim3{form.blocks, 1, 1}, dim3{form.threads, 1, 1},
                               addresses.data(), form.shared_bytes, on.native_handle()),
              "cudaLaunchKernel");
    }

private:
    cudaKernel_t native_;
};

namespace detail {

/// The cache of compiled kernels and the compiler's handle: one of the library's documented
/// globals. Key: text, entry point, options and architecture.
class kernel_cache {
public:
    [[nodiscard]] kernel find_or_compile(const kernel_source& source, int architecture) {
        const std::lock_guard lock{mutex_};
        std::string key = std::to_string(architecture) + '\n' + source.name + '\n';
        for (const std::string& option : source.options) {
            key += option + '\n';
        }
        key += source.text;
        if (const auto found = kernels_.find(key); found != kernels_.end()) {
            return found->second;
        }
        if (!compiler_) {
            compiler_ = nvrtc::open();
        }
        const kernel made = load(compiler_->compile(source, architecture), source.name);
        kernels_.emplace(std::move(key), made);
        return made;
    }

private:
    [[nodiscard]] static kernel load(const std::vector<std::byte>& code, const std::string& name) {
        cudaLibrary_t library = nullptr;
        check(cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
              "cudaLibraryLoadData");
        cudaKernel_t native = nullptr;
        check(cudaLibraryGetKernel(&native, library, name.c_str()), "cudaLibraryGetKernel");
        return kernel{native};
    }

    std::mutex mutex_;
    std::optional<nvrtc> compiler_;
    std::map<std::string, kernel, std::less<>> kernels_;
};

/// Never destroyed: the runtime may be gone before the process's last destructors run.
[[nodiscard]] inline kernel_cache& compiled_kernels() {
    static auto* const cache = new kernel_cache;
    return *cache;
}

}  // namespace detail

/// The kernel for the architecture of `device`: compiled at the first call for it in this process,
/// which takes some tenths of a second, and remembered. When this returns it is loaded onto
/// `device`, so that no launch has to. Thread-safe.
/// @throws unsupported_error NVRTC is missing, or cannot compile for the device.
[[nodiscard]] inline kernel load_kernel(const kernel_source& source, int device) {
    const int architecture = compute_capability(device);
    const device_guard guard{device};
    const auto found = detail::compiled_kernels().find_or_compile(source, architecture);
    found.load_here();
    return found;
}

}  // namespace weightwire::gpu
