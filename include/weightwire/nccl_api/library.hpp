#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <dlfcn.h>
#include <link.h>

#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/nvrtc.hpp>
#include <weightwire/nccl_api/nccl.hpp>
#include <weightwire/nccl_api/version.hpp>

/// @file
/// NCCL, opened at run time. Nothing links it, because the right copy is the peer's: NCCL refuses a
/// communicator whose ranks have different versions, and the process may already be linked to
/// another copy for reasons of its own.

namespace weightwire::nccl_api {

namespace detail {

/// What is called, by the types of the header. All of it is in NCCL since 2.18.
struct functions {
    decltype(&ncclGetVersion) get_version;
    decltype(&ncclGetUniqueId) get_unique_id;
    decltype(&ncclCommInitRankConfig) init_rank_config;
    decltype(&ncclCommGetAsyncError) get_async_error;
    decltype(&ncclCommAbort) abort;
    decltype(&ncclBroadcast) broadcast;
    decltype(&ncclAllReduce) all_reduce;
    decltype(&ncclGetErrorString) error_string;
    decltype(&ncclGetLastError) last_error;
};

/// One opened copy.
struct opened_library {
    functions calls{};
    std::string path{};
    std::string found{};  ///< how it was found, for people
    int version = 0;
};

template <class Function>
void find_symbol(void* handle, const char* name, Function& into) {
    void* found = ::dlsym(handle, name);
    if (found == nullptr) {
        throw unsupported_error{std::string{"the library has no "} + name +
                                    "; it is no libnccl, or one older than 2.18",
                                {.operation = "dlsym"}};
    }
    into = reinterpret_cast<Function>(found);
}

[[nodiscard]] inline functions find_functions(void* handle) {
    functions calls{};
    find_symbol(handle, "ncclGetVersion", calls.get_version);
    find_symbol(handle, "ncclGetUniqueId", calls.get_unique_id);
    find_symbol(handle, "ncclCommInitRankConfig", calls.init_rank_config);
    find_symbol(handle, "ncclCommGetAsyncError", calls.get_async_error);
    find_symbol(handle, "ncclCommAbort", calls.abort);
    find_symbol(handle, "ncclBroadcast", calls.broadcast);
    find_symbol(handle, "ncclAllReduce", calls.all_reduce);
    find_symbol(handle, "ncclGetErrorString", calls.error_string);
    find_symbol(handle, "ncclGetLastError", calls.last_error);
    return calls;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WEIGHTWIRE_NO_DEEP_BINDING 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define WEIGHTWIRE_NO_DEEP_BINDING 1
#endif
#endif

/// Local: its names must not reach others. Deep-bound: its own calls must reach itself, also where
/// another copy's names are global in the process. The address and thread sanitizers end a process
/// that binds deeply, so builds with them go without; such a process must not hold two copies.
[[nodiscard]] constexpr int open_flags() noexcept {
#ifdef WEIGHTWIRE_NO_DEEP_BINDING
    return RTLD_NOW | RTLD_LOCAL;
#else
    return RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
#endif
}

#undef WEIGHTWIRE_NO_DEEP_BINDING

[[nodiscard]] inline std::string path_of(void* handle, const std::string& otherwise) {
    const link_map* map = nullptr;
    if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || map->l_name == nullptr) {
        return otherwise;
    }
    return map->l_name;
}

/// A name for the loader or a path, and how it came about.
struct candidate {
    std::string file{};
    std::string found{};
};

/// Where a libnccl may be, when the caller names none.
[[nodiscard]] inline std::vector<candidate> library_candidates() {
    std::vector<candidate> list{{"libnccl.so.2", "by the loader's search"}};
    for (const std::string& prefix : gpu::detail::installation_prefixes()) {
        std::vector<std::string> files;
        for (const char* folder : {"/lib64/", "/lib/", "/lib/python3*/*-packages/nvidia/*/lib/"}) {
            gpu::detail::append_matches(prefix + folder + "libnccl.so.2", files);
        }
        for (std::string& file : files) {
            list.push_back({std::move(file), "below " + prefix});
        }
    }
    return list;
}

/// The opened copies: one of the library's documented globals. A copy is never closed, because its
/// threads run on.
class library_cache {
public:
    /// The copy that `wanted` names, or null with the loader's words in `why`.
    [[nodiscard]] const opened_library* open(const candidate& wanted, std::string& why) {
        const std::lock_guard lock{mutex_};
        void* handle = ::dlopen(wanted.file.c_str(), open_flags());
        if (handle == nullptr) {
            const char* words = ::dlerror();
            why += (why.empty() ? "" : "; ") + std::string{words != nullptr ? words : wanted.file};
            return nullptr;
        }
        if (const auto known = libraries_.find(handle); known != libraries_.end()) {
            ::dlclose(handle);  // one reference is kept
            return &known->second;
        }
        try {
            return &libraries_.emplace(handle, inspect(handle, wanted)).first->second;
        } catch (...) {
            ::dlclose(handle);
            throw;
        }
    }

private:
    [[nodiscard]] static opened_library inspect(void* handle, const candidate& wanted) {
        opened_library opened{
            .calls = {}, .path = path_of(handle, wanted.file), .found = wanted.found, .version = 0};
        try {
            opened.calls = find_functions(handle);
        } catch (const unsupported_error& missing) {
            throw unsupported_error{opened.path + ": " + missing.text(), missing.context()};
        }
        if (opened.calls.get_version(&opened.version) != ncclSuccess) {
            throw unsupported_error{opened.path + " does not tell its version; it cannot be used",
                                    {.operation = "ncclGetVersion"}};
        }
        return opened;
    }

    std::mutex mutex_;
    std::map<void*, opened_library> libraries_;
};

/// Never destroyed, as the libraries are never closed.
[[nodiscard]] inline library_cache& opened_libraries() {
    static auto* const cache = new library_cache;
    return *cache;
}

}  // namespace detail

/// One copy of NCCL, opened for the rest of the process. Copies of this object are cheap and mean
/// the same copy of NCCL. Thread-safe.
class library {
public:
    /// Opens the libnccl at `path`; opening one twice gives the same.
    ///
    /// Without a path, the first of these that opens: `libnccl.so.2` by the loader's rules (a copy
    /// that the process already holds comes first), then toolkits and NVIDIA's Python wheels below
    /// CUDA_HOME, CUDA_PATH, VIRTUAL_ENV, CONDA_PREFIX, the installations that PATH names, and the
    /// user's own packages. `description()` tells which it was.
    ///
    /// A path makes a copy of its own, even where the process is linked to another libnccl: name
    /// the very file that the peer uses, and the versions agree.
    /// @throws unsupported_error there is none, or the file is no libnccl of 2.18 or newer.
    [[nodiscard]] static library open(const std::string& path = {}) {
        const auto candidates =
            path.empty() ? detail::library_candidates()
                         : std::vector<detail::candidate>{{path, "by the path that was given"}};
        std::string tried;
        for (const detail::candidate& each : candidates) {
            if (const auto* found = detail::opened_libraries().open(each, tried)) {
                return library{found};
            }
        }
        error_context context;
        context.operation = "dlopen";
        context.native_text = tried;
        throw unsupported_error{
            path.empty() ? "libnccl.so.2 was not found; install NCCL or the Python wheel "
                           "nvidia-nccl, or name the path of the peer's libnccl"
                         : "libnccl was not opened at " + path +
                               "; name the path of the file libnccl.so.2 that the peer uses",
            std::move(context)};
    }

    /// As `ncclGetVersion` tells it: `22809` for 2.28.9. Ranks of one communicator have one.
    [[nodiscard]] int version() const noexcept { return opened_->version; }
    /// The file, as the loader names it.
    [[nodiscard]] const std::string& path() const noexcept { return opened_->path; }
    /// One line for people: version, file and how it was found.
    [[nodiscard]] std::string description() const {
        return "libnccl " + version_text(version()) + " at " + path() + ", found " + opened_->found;
    }
    /// The functions of this copy, for the other headers of this folder.
    [[nodiscard]] const detail::functions& calls() const noexcept { return opened_->calls; }

    [[nodiscard]] friend bool operator==(const library&, const library&) noexcept = default;

private:
    explicit library(const detail::opened_library* opened) noexcept : opened_{opened} {}

    const detail::opened_library* opened_;
};

}  // namespace weightwire::nccl_api
