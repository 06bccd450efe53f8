// SPDX-License-Identifier: Apache-2.0
//
// Sharded pull of device memory over UCX between processes of one machine and one GPU: two trainer
// ranks to two workers, four to four, over whatever UCX finds (tcp on one machine), through the
// backend and HTTP; and the same as if the workers were on a node of their own and had attention
// alike, which then comes once and fans out between their device memories. Every element of every
// worker is looked at after each round; then a worker is killed in a round and is back in the next.
// Beside it, of as many bytes at once: one read of the same fabric into the device, one of the host
// fabric into host memory, and the copies between pinned and device memory that no transfer hides.
// Exit 77: no GPU.
//
//   ucx_device_pull [--layers N] [--experts N] [--rounds N] [--chunk MiB] [--ranks 2|4] [--device
//   N]

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

#include <weightwire/fabrics/ucx/device_fabric.hpp>
#include <weightwire/fabrics/ucx/fabric.hpp>
#include <weightwire/gpu/device_guard.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/gpu/pinned_buffer.hpp>

#include "../../benchmarks/support/device_kit.hpp"
#include "../../benchmarks/support/pull_rounds.hpp"
#include "../support/forked.hpp"

namespace {

using namespace weightwire;

/// What the rounds of `pull_rounds` are made of.
struct ucx_device_kit : benchmarks::device_kit {
    using fabric = ucx::device_fabric;

    /// How a worker reads a trainer rank's memory in one piece: of both fabrics.
    struct way {
        std::array<char, 4096> address{};
        std::array<char, 4096> handle{};
    };
    struct shown {
        way device{};
        way host{};
        std::uint64_t bytes = 0;
    };

    static constexpr std::array<std::string_view, 4> uniform_names{
        "one read, device", "one read, host", "pinned to device", "device to pinned"};
    static constexpr std::size_t best = 0;
    /// Pinned memory of a process for the rows in one piece.
    static constexpr std::uint64_t most_bytes = std::uint64_t{256} << 20U;

    template <class Owner, class Arena>
    [[nodiscard]] static way way_to(Owner& owner, const Arena& arena) {
        way told;
        owner.address().copy(told.address.data(), told.address.size() - 1);
        arena.exported().handle.copy(told.handle.data(), told.handle.size() - 1);
        owner.serve(true);  // as long as the process
        return told;
    }
    [[nodiscard]] static shown show(const weights& memory, int device) {
        const auto bytes = std::min<std::uint64_t>(memory.blocks()[0].size(), most_bytes);
        static ucx::device_fabric::owner near{device};
        static ucx::fabric::owner host{device};
        static const auto packed = near.allocate(bytes);
        static const auto plain = host.allocate(bytes);
        near.pack(packed.data(), memory.blocks()[0].data(), bytes, 1, bytes);
        near.settle(benchmarks::pull_rounds::in_time(), {});
        std::fill_n(plain.data(), bytes, std::byte{1});
        fmt::print("a trainer rank: {}\n", near.remark());
        return {.device = way_to(near, packed), .host = way_to(host, plain), .bytes = bytes};
    }

    /// Whole memory of one trainer rank, over one fabric.
    template <class Fabric>
    class one_read {
    public:
        one_read(const way& from, std::uint64_t bytes, std::byte* to, int device)
            : reader_{device},
              connection_{reader_.connect(from.address.data(), in_time(), {})},
              memory_{reader_.open(connection_, from.handle.data(), bytes, in_time(), {})} {
            const std::array runs{
                remote_run<typename Fabric::memory>{.from = &memory_, .to = to, .bytes = bytes}};
            read_ = reader_.prepare(runs);
        }
        void run() {
            reader_.start(read_, 0);
            reader_.wait(read_, in_time(), {});
        }
        [[nodiscard]] const typename Fabric::reader& reader() const noexcept { return reader_; }

    private:
        [[nodiscard]] static deadline in_time() { return benchmarks::pull_rounds::in_time(); }

        typename Fabric::reader reader_;
        typename Fabric::connection connection_;
        typename Fabric::memory memory_;
        typename Fabric::read read_;
    };

    class uniform {
    public:
        uniform(const shown& from, const weights& to, int device)
            : bytes_{std::min<std::uint64_t>(from.bytes, to.blocks()[0].size())},
              landing_{to.blocks()[0].data()},
              plain_(bytes_),
              pinned_{static_cast<std::size_t>(bytes_)},
              stream_{device},
              near_{from.device, bytes_, landing_, device},
              host_{from.host, bytes_, plain_.data(), device} {
            fmt::print("a worker: {}\n", near_.reader().remark());
        }
        [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
        void run(std::size_t which) {
            switch (which) {
                case 0: near_.run(); break;
                case 1: host_.run(); break;
                case 2: copy(landing_, pinned_.data()); break;
                default: copy(pinned_.data(), landing_);
            }
        }

    private:
        void copy(std::byte* to, const std::byte* from) {
            gpu::copy_bytes(to, from, static_cast<std::size_t>(bytes_), stream_);
            stream_.synchronize();
        }

        std::uint64_t bytes_;
        std::byte* landing_;
        std::vector<std::byte> plain_;
        gpu::pinned_buffer pinned_;
        gpu::stream stream_;
        one_read<ucx::device_fabric> near_;
        one_read<ucx::fabric> host_;
    };
};

bool read(benchmarks::pull_settings& wanted, bool& one_size, std::string_view key,
          const std::string& value) {
    if (key == "--layers") {
        wanted.model.layers = std::stoll(value);
    } else if (key == "--experts") {
        wanted.model.experts = std::stoll(value);
    } else if (key == "--rounds") {
        wanted.rounds = std::max(1, std::stoi(value));
    } else if (key == "--chunk") {
        wanted.chunk_bytes = std::stoull(value) << 20U;
    } else if (key == "--device") {
        wanted.trainer_device = wanted.worker_device = std::stoi(value);
    } else if (key == "--ranks" && (value == "2" || value == "4")) {
        wanted.ranks = std::stoi(value);
        one_size = true;
    } else {
        return false;
    }
    return true;
}

/// Asked in a process of its own, since one that has used CUDA cannot be forked.
bool have_device() {
    tests::forked asks{
        [](const tests::channel& parent) { parent.put(gpu::device_count() > 0 ? 1 : 0); }};
    return asks.to().take<int>() == 1;
}

}  // namespace

int main(int argc, char** argv) try {
    benchmarks::pull_settings wanted;
    wanted.model.layers = 4;
    wanted.model.experts = 32;
    wanted.model.vocabulary = 16384;
    wanted.rounds = 5;
    bool one_size = false;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc || !read(wanted, one_size, argv[i], argv[i + 1])) {
            fmt::print(stderr, "ucx_device_pull: what is {}?\n", argv[i]);
            return 2;
        }
    }
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    if (!have_device()) {
        fmt::print("ucx_device_pull: no GPU\n");
        return 77;
    }
    fmt::print("UCX {}\n", ucx::library_version());
    int wrong = 0;
    for (const int ranks : {2, 4}) {
        if (one_size && wanted.ranks != ranks) {
            continue;
        }
        for (const bool apart : {false, true}) {
            auto asked = wanted;
            asked.ranks = ranks;
            asked.apart = apart;
            benchmarks::pull_rounds::program<ucx_device_kit> all{asked};
            fmt::print("{}:\n", apart ? "workers on a node of their own" : "all on one node");
            wrong += all.run();
            fmt::print("a worker of {} is killed in rounds:\n", ranks);
            wrong += all.kill();
            all.end();
        }
    }
    fmt::print("{}\n", wrong == 0 ? "all as asked" : "NOT all as asked");
    return wrong == 0 ? 0 : 1;
} catch (const std::exception& failed) {
    fmt::print(stderr, "ucx_device_pull: {}\n", failed.what());
    return 1;
}
