// SPDX-License-Identifier: Apache-2.0
//
// What sharded pull makes of the memory of one GPU, or of the links between two: the Qwen3-30B-A3B
// list, held once by four trainer ranks (PP2 x EP2), to four worker ranks (experts EP4, attention
// TP4), in_place, eight processes, over HTTP. Compared with as many plain copy calls, and with the
// copy kernels on contiguous memory, of as many bytes through the same mappings at once. Ways take
// turns within a round; every element of every worker is looked at after each pull.
//
//   sharded_pull_gpu [--layers N] [--rounds N] [--chunk MiB] [--trainer-device N]
//                    [--worker-device N] [--ranks 4|2|1] [--staged] [--kill]
//
// --ranks 2 and 1 are PP2 and one rank, to as many workers. --kill ends a worker in the middle of a
// round, looks at what the others have, starts it anew and sends again.

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/fabrics/cuda_ipc_fabric.hpp>
#include <weightwire/gpu/memory.hpp>

#include "../tests/gpu/ipc_pair.hpp"
#include "support/device_kit.hpp"
#include "support/pull_options.hpp"
#include "support/pull_rounds.hpp"
#include "support/uniform_copies.hpp"

namespace {

using namespace weightwire;

struct cuda_ipc_kit : benchmarks::device_kit {
    using fabric = cuda_ipc::fabric;

    static constexpr std::array<std::string_view, 3> uniform_names{"copy calls", "plain kernel",
                                                                   "bulk kernel"};
    static constexpr std::size_t best = 1;

    /// From one trainer rank's allocation.
    class uniform {
    public:
        uniform(const shown& from, const weights& to, int device)
            : machine_{device},
              from_{machine_.open(from.from(), from.what())},
              bytes_{std::min<std::uint64_t>(from_.size(), to.blocks()[0].size()) / 16 * 16},
              copies_{{benchmarks::copy_of(from_.data(), to.blocks()[0].data(), bytes_)}, device} {}
        [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
        void run(std::size_t which) const {
            switch (which) {
                case 0: copies_.calls(); break;
                case 1: copies_.plain(); break;
                default: copies_.bulk();
            }
        }

    private:
        cuda_ipc::cuda_machinery machine_;
        cuda_ipc::cuda_machinery::mapping from_;
        std::uint64_t bytes_;
        benchmarks::uniform_copies copies_;
    };
};

}  // namespace

int main(int argc, char** argv) try {
    benchmarks::pull_options options{.wanted = {.asked_copy = 0.90}};
    auto& wanted = options.wanted;
    if (!benchmarks::read_pull_options("sharded_pull_gpu", argc, argv, options,
                                       {{"--trainer-device", &wanted.trainer_device},
                                        {"--worker-device", &wanted.worker_device}})) {
        return 2;
    }
    // Between two GPUs a kernel is what their links are measured by.
    wanted.asked_kernel = wanted.worker_device != wanted.trainer_device ? 0.97 : 0;
    return benchmarks::run_pull<cuda_ipc_kit>(options);
} catch (const std::exception& failed) {
    fmt::print(stderr, "sharded_pull_gpu: {}\n", failed.what());
    return 1;
}
