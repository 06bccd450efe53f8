#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

/// @file
/// A fresh folder for a test's files, gone with the object.

namespace weightwire::test_support {

class temporary_folder {
public:
    temporary_folder() {
        auto pattern = (std::filesystem::temp_directory_path() / "weightwire-test-XXXXXX").string();
        if (::mkdtemp(pattern.data()) == nullptr) {
            throw std::runtime_error{"mkdtemp: no folder at " + pattern};
        }
        path_ = pattern;
    }
    temporary_folder(const temporary_folder&) = delete;
    temporary_folder& operator=(const temporary_folder&) = delete;
    ~temporary_folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    [[nodiscard]] const std::string& path() const noexcept { return path_; }
    /// The path of `name` in the folder.
    [[nodiscard]] std::string operator/(std::string_view name) const {
        return path_ + "/" + std::string{name};
    }
    /// Writes a file and returns its path.
    std::string write(std::string_view name, std::string_view content) const {
        const auto path = *this / name;
        std::filesystem::create_directories(std::filesystem::path{path}.parent_path());
        std::ofstream out{path, std::ios::binary};
        out.write(content.data(), static_cast<std::streamsize>(content.size()));
        out.close();
        if (!out) {
            throw std::runtime_error{"cannot write " + path};
        }
        return path;
    }

private:
    std::string path_;
};

}  // namespace weightwire::test_support
