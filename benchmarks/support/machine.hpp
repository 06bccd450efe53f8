#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fstream>
#include <string>
#include <thread>

namespace benchmarks {

/// Processor and cores of this machine, for the head of a table.
[[nodiscard]] inline std::string machine() {
    std::ifstream file{"/proc/cpuinfo"};
    std::string name = "unknown processor";
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("model name")) {
            name = line.substr(line.find(':') + 2);
            break;
        }
    }
    return name + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores";
}

}  // namespace benchmarks
