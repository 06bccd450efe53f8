#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <dlfcn.h>
#include <glob.h>
#include <link.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <weightwire/core/error.hpp>

/// @file
/// The run-time compiler of CUDA, opened when it is needed: nothing links it, and this header needs
/// no header of CUDA, so kernels are compiled on machines without a GPU too.

namespace weightwire::gpu {

/// A kernel as text. It includes nothing: NVRTC then needs no path.
struct kernel_source {
    std::string name;                  ///< the entry point, declared `extern "C"`
    std::string text;                  ///< CUDA C++
    std::vector<std::string> options;  ///< for the compiler, such as `-DWW_STAGES=4`
};

namespace detail {

/// Folder of the CUDA runtime that this process has loaded, with a slash; empty where none is. The
/// compiler beside it fits it, in a toolkit and in the wheels of CUDA 13 alike.
[[nodiscard]] inline std::string folder_of_loaded_runtime() {
    std::string folder;
    const auto visit = [](dl_phdr_info* loaded, std::size_t, void* result) {
        const std::string_view path{loaded->dlpi_name != nullptr ? loaded->dlpi_name : ""};
        const std::size_t slash = path.rfind('/');
        if (slash == path.npos || !path.substr(slash + 1).starts_with("libcudart.so")) {
            return 0;
        }
        *static_cast<std::string*>(result) = path.substr(0, slash + 1);
        return 1;
    };
    dl_iterate_phdr(visit, &folder);
    return folder;
}

/// Where Python and toolkits are installed, as the environment tells.
[[nodiscard]] inline std::vector<std::string> installation_prefixes() {
    std::vector<std::string> prefixes;
    const auto variable = [](const char* name) {
        const char* value = std::getenv(name);
        return std::string{value != nullptr ? value : ""};
    };
    for (const char* name : {"CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"}) {
        if (std::string value = variable(name); !value.empty()) {
            prefixes.push_back(std::move(value));
        }
    }
    const std::string path = variable("PATH");
    for (std::size_t begin = 0; begin < path.size();) {
        const std::size_t end = path.find(':', begin);
        const std::string_view folder = std::string_view{path}.substr(begin, end - begin);
        if (folder.starts_with('/')) {
            prefixes.push_back(std::string{folder} + "/..");
        }
        begin = end == path.npos ? path.size() : end + 1;
    }
    if (const std::string home = variable("HOME"); !home.empty()) {
        prefixes.push_back(home + "/.local");
    }
    return prefixes;
}

/// Files that fit a pattern, the last name first: that is the newest version.
inline void append_matches(const std::string& pattern, std::vector<std::string>& files) {
    glob_t found{};
    if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
        for (std::size_t i = found.gl_pathc; i-- > 0;) {
            files.emplace_back(found.gl_pathv[i]);
        }
    }
    globfree(&found);
}

/// What `dlopen` is asked for, in this order: beside the runtime, by name, in toolkits and wheels.
[[nodiscard]] inline std::vector<std::string> nvrtc_candidates() {
    constexpr std::string_view file = "libnvrtc.so.[0-9]*";
    std::vector<std::string> files;
    if (const std::string beside = folder_of_loaded_runtime(); !beside.empty()) {
        append_matches(beside + std::string{file}, files);
    }
    files.insert(files.end(), {"libnvrtc.so.13", "libnvrtc.so.12"});
    for (const std::string& prefix : installation_prefixes()) {
        for (const char* folder : {"/lib64/", "/lib/", "/lib/python3*/*-packages/nvidia/*/lib/"}) {
            append_matches(prefix + folder + std::string{file}, files);
        }
    }
    return files;
}

struct library_closer {
    void operator()(void* handle) const noexcept { static_cast<void>(dlclose(handle)); }
};
using loaded_library = std::unique_ptr<void, library_closer>;

/// NVRTC stays mapped after a close: it allocates memory that it does not free then.
inline constexpr int open_flags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;

/// Opens the part of NVRTC that it opens itself, by name, at the first compilation. The one in
/// NVIDIA's wheels does not look in its own folder; a library that is already open it finds.
[[nodiscard]] inline loaded_library open_builtins_beside(const std::string& file) {
    const std::size_t slash = file.rfind('/');
    std::vector<std::string> found;
    if (slash != file.npos) {
        append_matches(file.substr(0, slash + 1) + "libnvrtc-builtins.so.[0-9]*", found);
    }
    return loaded_library{found.empty() ? nullptr : dlopen(found[0].c_str(), open_flags)};
}

}  // namespace detail

/// NVRTC, opened. Thread-safe, as NVRTC is. Movable; closing it leaves compiled code usable.
class nvrtc {
public:
    /// Opens the library at `path`; without one, the first of these that opens: beside the CUDA
    /// runtime that the process has loaded, by the loader's own search, in the toolkits and in
    /// NVIDIA's Python wheels below CUDA_HOME, CUDA_PATH, VIRTUAL_ENV, CONDA_PREFIX, the
    /// installations that PATH names, and the user's own packages.
    /// @throws unsupported_error no library was found, or it is too old; the message names it.
    [[nodiscard]] static nvrtc open(const std::string& path = {}) {
        std::string tried;
        const auto files =
            path.empty() ? detail::nvrtc_candidates() : std::vector<std::string>{path};
        for (const std::string& file : files) {
            if (void* handle = dlopen(file.c_str(), detail::open_flags); handle != nullptr) {
                return nvrtc{handle, file};
            }
            const char* why = dlerror();
            tried += (tried.empty() ? "" : "; ") + std::string{why != nullptr ? why : file};
        }
        error_context context;
        context.operation = "dlopen";
        context.native_text = tried;
        throw unsupported_error{
            "libnvrtc.so, the run-time compiler of CUDA, was not found; install the CUDA toolkit's "
            "NVRTC or the Python wheel nvidia-cuda-nvrtc, or name its path",
            std::move(context)};
    }

    /// Compiles to machine code.
    /// @param source the kernel.
    /// @param architecture compute capability, such as 90 for sm_90.
    /// @throws unsupported_error the text does not compile, or the compiler does not know the
    /// architecture; the context has the compiler's words.
    [[nodiscard]] std::vector<std::byte> compile(const kernel_source& source,
                                                 int architecture) const {
        program_handle program = nullptr;
        require(create_(&program, source.text.c_str(), source.name.c_str(), 0, nullptr, nullptr),
                "nvrtcCreateProgram", source, {});
        const auto destroy = [this](program_handle held) { destroy_(&held); };
        const std::unique_ptr<void, decltype(destroy)> owner{program, destroy};
        const std::string target = "--gpu-architecture=sm_" + std::to_string(architecture);
        std::vector<const char*> options{target.c_str(), "--std=c++17"};
        for (const std::string& option : source.options) {
            options.push_back(option.c_str());
        }
        const int status = compile_(program, static_cast<int>(options.size()), options.data());
        require(status, "nvrtcCompileProgram for sm_" + std::to_string(architecture), source,
                status == 0 ? std::string{} : log_of(program));
        std::size_t size = 0;
        require(size_(program, &size), "nvrtcGetCUBINSize", source, {});
        std::vector<std::byte> code(size);
        require(code_(program, reinterpret_cast<char*>(code.data())), "nvrtcGetCUBIN", source, {});
        return code;
    }

    /// What was opened: a path, or a name that the loader found.
    [[nodiscard]] const std::string& file() const noexcept { return file_; }

private:
    // NVRTC's C interface: a status is an enumeration with 0 for success, a program a pointer.
    using program_handle = void*;
    using create_function = int(program_handle*, const char*, const char*, int, const char* const*,
                                const char* const*);
    using destroy_function = int(program_handle*);
    using compile_function = int(program_handle, int, const char* const*);
    using size_function = int(program_handle, std::size_t*);
    using bytes_function = int(program_handle, char*);
    using text_function = const char*(int);

    nvrtc(void* handle, std::string file)
        : builtins_{detail::open_builtins_beside(file)},
          library_{handle},
          file_{std::move(file)},
          create_{symbol<create_function>("nvrtcCreateProgram")},
          destroy_{symbol<destroy_function>("nvrtcDestroyProgram")},
          compile_{symbol<compile_function>("nvrtcCompileProgram")},
          size_{symbol<size_function>("nvrtcGetCUBINSize")},
          code_{symbol<bytes_function>("nvrtcGetCUBIN")},
          log_size_{symbol<size_function>("nvrtcGetProgramLogSize")},
          log_{symbol<bytes_function>("nvrtcGetProgramLog")},
          text_{symbol<text_function>("nvrtcGetErrorString")} {}

    template <class Function>
    [[nodiscard]] Function* symbol(const char* name) const {
        void* found = dlsym(library_.get(), name);
        if (found == nullptr) {
            throw unsupported_error{file_ + " has no " + name +
                                    "; NVRTC of CUDA 12.8 or newer is "
                                    "needed"};
        }
        return reinterpret_cast<Function*>(found);
    }

    [[nodiscard]] std::string log_of(program_handle program) const {
        std::size_t size = 0;
        if (log_size_(program, &size) != 0 || size < 2) {
            return {};
        }
        std::string log(size, '\0');
        static_cast<void>(log_(program, log.data()));
        log.resize(size - 1);  // the terminating zero is counted
        return log;
    }

    void require(int status, const std::string& operation, const kernel_source& source,
                 std::string log) const {
        if (status == 0) {
            return;
        }
        error_context context;
        context.operation = operation;
        context.native_code = status;
        context.native_text = std::string{text_(status)} + (log.empty() ? "" : ": ") + log;
        throw unsupported_error{"the kernel " + source.name + " was not compiled by " + file_,
                                std::move(context)};
    }

    detail::loaded_library builtins_;
    detail::loaded_library library_;
    std::string file_;
    create_function* create_;
    destroy_function* destroy_;
    compile_function* compile_;
    size_function* size_;
    bytes_function* code_;
    size_function* log_size_;
    bytes_function* log_;
    text_function* text_;
};

}  // namespace weightwire::gpu
