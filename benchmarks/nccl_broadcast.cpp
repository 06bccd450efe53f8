// SPDX-License-Identifier: Apache-2.0
//
// What of the wire between two GPUs does an nccl transfer use? One process a GPU, the whole list of
// Qwen3-30B-A3B on both, and side by side in every round:
//
//   raw       ncclBroadcast of the same number of bytes in pieces of the chunk size, from one
//   buffer
//             to one buffer: no gather, no scatter, NCCL called directly; and one a tensor, each
//             from its place to its place
//   packed    basic_sender and basic_receiver, with several sizes and numbers of buffers
//   unpacked  the same, one broadcast a tensor
//   beside N  packed with two buffers, gather and scatter beside the wire on N blocks
//   HTTP      send_weights() of a trainer engine to a worker server over its device memory
//
// A transfer counts from when the worker begins, before it tells the trainer so, to when its last
// byte is in place; the HTTP row is the whole call on the trainer. Weights come from a hash of
// name, place and round, made on the device; before each transfer the worker's memory is
// overwritten, and after it the digests of every tensor are compared. The order of the rows turns
// in every round.
//
//   nccl_broadcast [--layers N] [--rounds N] [--one-device] [--no-sweep] [--skip TEXT]
//
// --skip leaves out rows that begin with TEXT, but for the raw ones that others are compared with.
//
// Each GPU holds the list, 61.1 GB with all 48 layers, and about 25 GB of buffers. The library is
// WEIGHTWIRE_LIBNCCL's, else the one that is found.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/nccl/backend.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/core/digest.hpp>
#include <weightwire/gpu/kernels/digest.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/plan/coverage.hpp>
#include <weightwire/sinks/device_memory.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "../tests/gpu/nccl_pair.hpp"
#include "support/device_weights.hpp"
#include "support/options.hpp"
#include "support/parameter_lists.hpp"
#include "support/process_pair.hpp"
#include "support/timing.hpp"

namespace {

using namespace weightwire;
using benchmarks::device_weights;
using benchmarks::median;
using benchmarks::monotonic;
using benchmarks::put_long;
using benchmarks::row_of;
using benchmarks::seconds_between;
using benchmarks::take_long;

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20U;
constexpr int warm_ups = 3;
constexpr unsigned int all_blocks = 1U << 30U;

deadline in_time() { return deadline::after(std::chrono::seconds{60}); }

// --- What is compared.

struct settings {
    std::int64_t layers = 48;
    int rounds = 10;
    bool one_device = false;
    bool no_sweep = false;
    std::string skip{};
};

enum class kind : std::uint8_t { raw, raw_each, packed, unpacked, whole_round };

struct way {
    std::string name{};
    kind what = kind::raw;
    std::uint64_t chunk_bytes = 0;
    std::uint64_t buffers = 2;
    unsigned int blocks = 0;  ///< of gather and scatter beside the wire; 0: the backend's choice
    std::size_t against = 0;  ///< the raw row that it is compared with
};

std::vector<way> ways_of(const settings& wanted) {
    std::vector<way> list;
    constexpr std::array sizes{1024 * mebibyte, 256 * mebibyte};
    const auto named = [](std::uint64_t bytes) { return fmt::format("{} MiB", bytes / mebibyte); };
    for (const auto size : sizes) {
        list.push_back({.name = "raw, " + named(size), .what = kind::raw, .chunk_bytes = size});
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        for (const std::uint64_t buffers : {2U, 3U}) {
            list.push_back({.name = fmt::format("packed, {} x {}", buffers, named(sizes[i])),
                            .what = kind::packed,
                            .chunk_bytes = sizes[i],
                            .buffers = buffers,
                            .against = i});
        }
    }
    list.push_back({.name = "raw, one a tensor", .what = kind::raw_each});
    list.push_back({.name = "unpacked", .what = kind::unpacked});
    list.push_back(
        {.name = "HTTP, 2 x 1024 MiB", .what = kind::whole_round, .chunk_bytes = sizes[0]});
    for (std::size_t i = 0; !wanted.no_sweep && i < sizes.size(); ++i) {
        for (const unsigned int blocks : {16U, 66U, 132U, all_blocks}) {
            list.push_back(
                {.name = fmt::format("2 x {}, beside {}", named(sizes[i]),
                                     blocks == all_blocks ? "all" : std::to_string(blocks)),
                 .what = kind::packed,
                 .chunk_bytes = sizes[i],
                 .blocks = blocks,
                 .against = i});
        }
    }
    std::erase_if(list, [&](const way& one) {
        return one.what != kind::raw && !wanted.skip.empty() && one.name.starts_with(wanted.skip);
    });
    return list;
}

// --- The two ends of each way. An end performs one transfer a call.

/// NCCL itself, as a program without this library would call it.
class raw_broadcasts {
public:
    raw_broadcasts(const wire::unique_id& id, int rank, int device)
        : library_{nccl_pair::open_library()}, stream_{device} {
        ncclUniqueId native{};
        std::memcpy(native.internal, id.data(), id.size());
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        require(library_.calls().init_rank_config(&group_, 2, native, rank, &config));
    }
    /// Each tensor from or to its place.
    void set_pieces(const device_weights& weights) {
        for (const auto& view : weights.views()) {
            pieces_.emplace_back(view.data(), view.byte_size());
        }
    }
    /// `bytes` from or to one buffer of `piece` bytes, again and again.
    void set_pieces(std::uint64_t bytes, std::uint64_t piece, int device) {
        buffer_ = gpu::device_buffer{device, piece};
        for (std::uint64_t at = 0; at < bytes; at += piece) {
            pieces_.emplace_back(buffer_.data(), std::min(bytes - at, piece));
        }
    }
    void run() const {
        for (const auto& piece : pieces_) {
            require(library_.calls().broadcast(piece.data(), piece.data(), piece.size(), ncclUint8,
                                               0, group_, stream_.native_handle()));
        }
        stream_.synchronize();
    }

private:
    void require(ncclResult_t result) const {
        if (result != ncclSuccess) {
            throw std::runtime_error{library_.calls().error_string(result)};
        }
    }
    nccl_api::library library_;
    gpu::stream stream_;
    gpu::device_buffer buffer_;
    std::vector<std::span<std::byte>> pieces_;
    ncclComm_t group_ = nullptr;  ///< ends with the process
};

std::shared_ptr<raw_broadcasts> raw_of(const way& one, const wire::unique_id& id, int rank,
                                       const manifest& parameters, const device_weights& weights,
                                       int device) {
    auto made = std::make_shared<raw_broadcasts>(id, rank, device);
    one.what == kind::raw ? made->set_pieces(parameters.total_bytes(), one.chunk_bytes, device)
                          : made->set_pieces(weights);
    return made;
}

/// The GPU's machinery, with a number of blocks beside the wire. Set before a half is made.
struct swept_machinery : nccl::cuda_machinery {
    static inline unsigned int blocks = 0;
    swept_machinery(int device, const std::string& library)
        : nccl::cuda_machinery{device, library} {
        if (blocks != 0) {
            set_blocks_beside_broadcast(blocks);
        }
    }
};

/// What a worker tells of a transfer.
struct arrived {
    double seconds = 0;
    double first = 0;          ///< until the first tensor was in place
    std::uint64_t digest = 0;  ///< 0: not all of it came
};

// --- The worker.

struct places {
    const device_weights* held;
    coverage seen;
    monotonic::time_point first{};
    mutable_tensor_view open(std::size_t i, deadline) const { return held->views()[i]; }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        if (first == monotonic::time_point{}) {
            first = monotonic::now();
        }
        seen.wrote(i, offset, count);
    }
};

/// One end on the worker: performs a transfer and tells what it saw, but not the digest.
using worker_end = std::function<arrived(std::uint64_t round)>;

worker_end receive_raw(const way& one, const manifest& parameters, const device_weights& weights,
                       tests::channel& parent, int device) {
    const auto id = parent.take<wire::unique_id>();
    const auto group = raw_of(one, id, 1, parameters, weights, device);
    return [group, &parent](std::uint64_t) {
        const auto begin = monotonic::now();
        parent.put(true);
        group->run();
        return arrived{.seconds = seconds_between(begin, monotonic::now())};
    };
}

worker_end receive_ours(const way& one, const manifest& parameters, const device_weights& weights,
                        tests::channel& parent, int device) {
    swept_machinery::blocks = one.blocks;
    const auto message = take_long(parent);
    const auto transport = take_long(parent);
    const auto receiver = std::make_shared<nccl::basic_receiver<swept_machinery>>(
        receiver_context{.global_rank = 1, .world_size = 2, .device = device});
    receiver->open({.wire_parameters = message, .transport = transport, .parameters = &parameters},
                   in_time(), {});
    return [receiver, &parameters, &weights, &parent](std::uint64_t round) {
        places to{&weights, coverage{parameters}};
        update_target target{to, parameters, 0, parameters.size()};
        const auto begin = monotonic::now();
        parent.put(true);
        receiver->receive({.round = round, .count = parameters.size(), .native = true}, target,
                          in_time(), {});
        const auto end = monotonic::now();
        if (!to.seen.all_whole()) {
            throw std::runtime_error{"the transfer ended with tensors missing"};
        }
        return arrived{.seconds = seconds_between(begin, end),
                       .first = seconds_between(begin, to.first)};
    };
}

void worker(tests::channel& parent, const settings& wanted) {
    const int device = nccl_pair::choose_device(1, wanted.one_device);
    const manifest parameters{benchmarks::qwen3_30b_a3b_list(wanted.layers)};
    const device_weights weights{parameters, device};
    std::vector<user_parameter> held;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        held.push_back({parameters[i].name, weights.views()[i]});
    }
    auto table = device_parameter_table::over(std::move(held), gpu_memory{device},
                                              {.mode = commit_mode::in_place});
    worker_engine engine{nccl::backend{}, table};
    worker_service service{engine};
    worker_server server{service, {}};
    server.start();
    parent.put(server.port());
    const auto ways = ways_of(wanted);
    std::vector<worker_end> ends;
    for (const auto& one : ways) {
        switch (one.what) {
            case kind::raw:
            case kind::raw_each:
                ends.push_back(receive_raw(one, parameters, weights, parent, device));
                break;
            case kind::whole_round:
                ends.push_back([&](std::uint64_t) {
                    parent.put(true);
                    static_cast<void>(parent.take<bool>());  // the trainer's call has returned
                    return arrived{};
                });
                break;
            default: ends.push_back(receive_ours(one, parameters, weights, parent, device));
        }
    }
    for (int round = 0; round < warm_ups + wanted.rounds; ++round) {
        for (std::size_t turn = 0; turn < ways.size(); ++turn) {
            const auto row = row_of(round, turn, ways.size());
            weights.overwrite();
            static_cast<void>(parent.take<bool>());  // the trainer is ready
            auto told = ends[row](static_cast<std::uint64_t>(round) + 1);
            told.digest = ways[row].what == kind::raw ? 0 : weights.digest();
            parent.put(told);
        }
    }
    static_cast<void>(parent.take<bool>());
    ::_exit(0);  // nobody waits for the orderly end of so many groups
}

// --- The trainer.

using trainer_end = std::function<void(std::uint64_t round)>;

trainer_end send_raw(const way& one, const manifest& parameters, const device_weights& weights,
                     tests::channel& child, int device) {
    const auto id = nccl_api::communicator::make_unique_id(nccl_pair::open_library());
    child.put(id);
    const auto group = raw_of(one, id, 0, parameters, weights, device);
    return [group](std::uint64_t) { group->run(); };
}

nccl::trainer_init_info info_of(const way& one, int device) {
    nccl::trainer_init_info info{.packed = one.what != kind::unpacked, .device = device};
    if (info.packed) {
        info.packed_buffer_size_bytes = one.chunk_bytes;
        info.packed_num_buffers = one.buffers;
    }
    return info;
}

trainer_end send_ours(const way& one, const manifest& parameters, const device_weights& weights,
                      span_source& source, tests::channel& child, int device) {
    swept_machinery::blocks = one.blocks;
    const auto info = info_of(one, device);
    const auto sender = std::make_shared<nccl::basic_sender<swept_machinery>>(info);
    const std::vector<peer_info> peers{{.name = "worker", .native = true}};
    const std::vector<tensor_view> stable(weights.views().begin(), weights.views().end());
    const auto inits = sender->prepare({.parameters = parameters,
                                        .peers = peers,
                                        .world_size = 2,
                                        .lifetime = tensor_lifetime::stable,
                                        .stable_tensors = stable});
    if (one.blocks == 0) {
        fmt::print("{}: {}\n", one.name, sender->description());
    }
    put_long(child, info.init_message());
    put_long(child, inits[0].native);
    sender->open(in_time(), {});
    return [sender, &parameters, &source](std::uint64_t round) {
        round_of<span_source> all{source, parameters};
        auto tensors = all.stream();
        sender->send(round, 0, tensors, in_time(), {});
    };
}

/// Seconds of each counted round.
struct measured {
    std::vector<double> taken;
    std::vector<double> trainer;  ///< its own call
    std::vector<double> first;    ///< until the worker's first tensor was in place
};

void print(const std::vector<way>& ways, const std::vector<measured>& rows,
           std::uint64_t total_bytes) {
    fmt::print("{:<24} {:>9} {:>9} {:>9} {:>7} {:>7} {:>11} {:>9}\n", "way", "ms", "fastest",
               "slowest", "GB/s", "of raw", "trainer ms", "first ms");
    for (std::size_t i = 0; i < ways.size(); ++i) {
        const auto& row = rows[i];
        const auto taken = median(row.taken);
        const auto raw = median(rows[ways[i].against].taken);
        const bool ours = ways[i].what == kind::packed || ways[i].what == kind::unpacked;
        fmt::print("{:<24} {:>9.3f} {:>9.3f} {:>9.3f} {:>7.1f} {:>7} {:>11.3f} {:>9}\n",
                   ways[i].name, taken * 1e3, *std::ranges::min_element(row.taken) * 1e3,
                   *std::ranges::max_element(row.taken) * 1e3,
                   static_cast<double>(total_bytes) / taken * 1e-9,
                   ways[i].what == kind::raw ? "-" : fmt::format("{:.1f} %", raw / taken * 100),
                   median(row.trainer) * 1e3,
                   ours ? fmt::format("{:.3f}", median(row.first) * 1e3) : "-");
    }
}

int trainer(tests::channel& child, const settings& wanted) {
    const int device = nccl_pair::choose_device(0, wanted.one_device);
    const manifest parameters{benchmarks::qwen3_30b_a3b_list(wanted.layers)};
    const device_weights weights{parameters, device};
    std::vector<named_tensor> tensors;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        tensors.push_back({.name = parameters[i].name, .tensor = weights.views()[i]});
    }
    span_source source{tensors};
    http_sync_client client{fmt::format("http://127.0.0.1:{}", child.take<std::uint16_t>())};
    const auto ways = ways_of(wanted);
    std::vector<trainer_end> ends;
    for (const auto& one : ways) {
        switch (one.what) {
            case kind::raw:
            case kind::raw_each:
                ends.push_back(send_raw(one, parameters, weights, child, device));
                break;
            case kind::whole_round: ends.emplace_back(); break;
            default: ends.push_back(send_ours(one, parameters, weights, source, child, device));
        }
    }
    auto engine =
        trainer_init(info_of({.what = kind::whole_round, .chunk_bytes = 1024 * mebibyte}, device),
                     client, source);
    std::vector<double> data_phases;
    for (std::size_t i = 0; i < ways.size(); ++i) {
        if (ways[i].what == kind::whole_round) {
            ends[i] = [&](std::uint64_t) {
                data_phases.push_back(engine.send_weights().data_seconds);
            };
        }
    }
    int wrong = 0;
    std::vector<measured> rows(ways.size());
    for (int round = 0; round < warm_ups + wanted.rounds; ++round) {
        weights.fill(static_cast<std::uint64_t>(round) + 1);
        const auto expected = weights.digest();
        for (std::size_t turn = 0; turn < ways.size(); ++turn) {
            const auto row = row_of(round, turn, ways.size());
            const auto& one = ways[row];
            child.put(true);
            static_cast<void>(child.take<bool>());
            const auto begin = monotonic::now();
            ends[row](static_cast<std::uint64_t>(round) + 1);
            const auto seconds = seconds_between(begin, monotonic::now());
            if (one.what == kind::whole_round) {
                child.put(true);
            }
            const auto told = child.take<arrived>();
            if (one.what != kind::raw && told.digest != expected) {
                ++wrong;
                fmt::print("{}: digests DIFFER in round {}\n", one.name, round + 1);
            }
            if (round >= warm_ups) {
                rows[row].taken.push_back(one.what == kind::whole_round ? seconds : told.seconds);
                rows[row].trainer.push_back(seconds);
                rows[row].first.push_back(told.first);
            }
        }
    }
    fmt::print(
        "Qwen3-30B-A3B list of {} layers: {} tensors, {:.1f} GB, {}; medians of {} rounds after "
        "{}\n",
        wanted.layers, parameters.size(), static_cast<double>(parameters.total_bytes()) * 1e-9,
        wanted.one_device ? "one device" : "two devices", wanted.rounds, warm_ups);
    print(ways, rows, parameters.total_bytes());
    if (!data_phases.empty()) {
        data_phases.erase(data_phases.begin(), data_phases.begin() + warm_ups);
        fmt::print("HTTP: the worker's own data phase {:.3f} ms\n", median(data_phases) * 1e3);
    }
    fmt::print("{}\n", wrong == 0 ? "digests of every tensor were equal after every transfer"
                                  : "digests differed");
    child.put(true);
    return wrong;
}

}  // namespace

int main(int argc, char** argv) {
    settings wanted;
    if (!benchmarks::read_options("nccl_broadcast", argc, argv,
                                  {{"--one-device", &wanted.one_device},
                                   {"--no-sweep", &wanted.no_sweep},
                                   {"--layers", &wanted.layers},
                                   {"--skip", &wanted.skip},
                                   {"--rounds", &wanted.rounds}})) {
        return 2;
    }
    return benchmarks::run_pair(
               "nccl_broadcast", [&](tests::channel& child) { return trainer(child, wanted); },
               [&](tests::channel& parent) { worker(parent, wanted); }) == 0
               ? 0
               : 1;
}
