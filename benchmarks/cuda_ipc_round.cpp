// SPDX-License-Identifier: Apache-2.0
//
// What of a device's memory does a cuda_ipc round use? Trainer and worker are two processes on one
// GPU, with the whole list of Qwen3-30B-A3B on both, and side by side in every round:
//
//   copy calls       cudaMemcpyAsync from the mapping to the worker's memory, the same bytes: one
//                    call an allocation of the trainer's
//   bulk, plain      our copy kernels over the same bytes as uniform runs, one an allocation
//   inside           copy calls inside the worker's process, half of its memory onto the other half
//                    and back
//   halves           sender and receiver without calls: what the receiver takes
//   data phase       of send_weights(), as the worker reports it
//   send_weights()   of a trainer engine to a worker server over HTTP: the whole call
//
// Weights come from a hash of name, place and round, made on the device. Before each transfer the
// worker's memory is overwritten, after it the digests of every tensor are compared, neither within
// what is timed. The order of the rows turns in every round.
//
//   cuda_ipc_round [--layers N] [--mode in_place|flip|copy_in] [--rounds N] [--check-every N]
//                  [--allocation MiB] [--packed] [--worker-device N]
//
// --allocation cuts the trainer's memory into allocations of so many MiB, where no tensor is
// larger; without it there is one. --packed sends through the ring. --worker-device 1 puts the
// worker on another GPU than the trainer's, which is device 0. The very first round has compiled
// nothing before: its weights are made by the runtime's own calls.
//
// Device memory: 61.1 GB with all 48 layers, twice in in_place, three times in copy_in, four
// times in flip.

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/backends/cuda_ipc/backend.hpp>
#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/gpu/memory.hpp>
#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/worker_server.hpp>
#include <weightwire/plan/coverage.hpp>
#include <weightwire/sinks/device_memory.hpp>
#include <weightwire/trainer.hpp>
#include <weightwire/worker.hpp>

#include "../tests/gpu/ipc_pair.hpp"
#include "../tests/support/allocations.hpp"
#include "../tests/support/device_allocations.hpp"
#include "support/device_weights.hpp"
#include "support/options.hpp"
#include "support/parameter_lists.hpp"
#include "support/process_pair.hpp"
#include "support/timing.hpp"
#include "support/uniform_copies.hpp"

namespace {

using namespace weightwire;
using benchmarks::device_weights;
using benchmarks::median;
using benchmarks::monotonic;
using benchmarks::seconds_since;
using tests::channel;

constexpr int warm_ups = 3;
constexpr double asked_data = 0.95;
constexpr double asked_whole = 0.85;
constexpr double asked_first_seconds = 1.0;

deadline in_time() { return deadline::after(std::chrono::seconds{60}); }

struct settings {
    std::int64_t layers = 48;
    commit_mode mode = commit_mode::in_place;
    int rounds = 10;
    int check_every = 1;
    std::uint64_t allocation_bytes = 0;
    bool packed = false;
    int worker_device = 0;  ///< the trainer's is 0
};

enum class way : std::uint8_t { calls, bulk, plain, inside, halves, whole };
constexpr std::array ways{way::calls, way::bulk, way::plain, way::inside, way::halves, way::whole};
constexpr std::array<std::string_view, ways.size()> names{
    "copy calls", "bulk kernel", "plain kernel", "inside one process", "halves", "send_weights()"};

/// What the trainer asks the worker for.
struct turn {
    way what = way::calls;
    bool check = true;
    bool end = false;
};

/// What the worker tells of it.
struct arrived {
    double seconds = 0;
    std::uint64_t digest = 0;              ///< 0: not all of it came, or nothing was asked
    std::uint64_t host_allocations = 0;    ///< of the receiver's thread
    std::uint64_t device_allocations = 0;  ///< of the process, pinned memory too
};

std::uint64_t device_allocations() { return weightwire_tests::device_allocations.load(); }

/// In megabytes, by all processes.
double used_device_memory() {
    std::size_t free = 0;
    std::size_t total = 0;
    gpu::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<double>(total - free) * 1e-6;
}

void start_device(int device) {
    gpu::check(cudaSetDevice(device), "cudaSetDevice");
    gpu::check(cudaFree(nullptr), "cudaFree");
}

// --- The worker.

struct places {
    const device_weights* held;
    coverage seen;
    mutable_tensor_view open(std::size_t i, deadline) const { return held->views()[i]; }
    void wrote(std::size_t i, std::uint64_t offset, std::uint64_t count, deadline) {
        seen.wrote(i, offset, count);
    }
};

/// The table of the mode: over `landing`, but for `flip`, which has memory of its own.
std::unique_ptr<device_parameter_table> make_table(const manifest& parameters,
                                                   const device_weights& landing, commit_mode mode,
                                                   int device) {
    if (mode == commit_mode::flip) {
        return std::make_unique<device_parameter_table>(parameters, gpu_memory{device},
                                                        parameter_table_options{.mode = mode});
    }
    std::vector<user_parameter> held;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        held.push_back({parameters[i].name, landing.views()[i]});
    }
    return std::unique_ptr<device_parameter_table>{new device_parameter_table(
        device_parameter_table::over(std::move(held), gpu_memory{device}, {.mode = mode}))};
}

/// Copies that need no backend: every allocation of the trainer's as one run.
class mapped_copies {
public:
    mapped_copies(std::vector<cuda_ipc::cuda_machinery::mapping> from, const device_weights& to,
                  int device)
        : from_{std::move(from)}, to_{to}, copies_{pieces(from_, to), device} {}

    /// @returns seconds; 0 where the device has no such form.
    [[nodiscard]] double run(way what) const {
        const auto begin = monotonic::now();
        switch (what) {
            case way::calls: copies_.calls(); break;
            case way::inside:
                for (const auto& block : to_.blocks()) {
                    const auto half = block.size() / 2;
                    gpu::copy_bytes(block.data() + half, block.data(), half, copies_.stream());
                    gpu::copy_bytes(block.data(), block.data() + half, half, copies_.stream());
                }
                copies_.stream().synchronize();
                break;
            case way::plain: copies_.plain(); break;
            case way::bulk:
                if (!copies_.has_bulk()) {
                    return 0;
                }
                copies_.bulk();
                break;
            default: throw std::logic_error{"no uniform copy"};
        }
        return seconds_since(begin);
    }

private:
    [[nodiscard]] static std::vector<gpu::copy_item> pieces(
        const std::vector<cuda_ipc::cuda_machinery::mapping>& from, const device_weights& to) {
        std::vector<gpu::copy_item> all;
        for (std::size_t k = 0; k < from.size(); ++k) {
            const auto& block = to.blocks()[k];
            all.push_back(benchmarks::copy_of(from[k].data(), block.data(), block.size()));
        }
        return all;
    }

    std::vector<cuda_ipc::cuda_machinery::mapping> from_;
    const device_weights& to_;
    benchmarks::uniform_copies copies_;
};

/// A receiver without a server.
class receiving_half {
public:
    receiving_half(const channel& parent, const manifest& parameters, const device_weights& to,
                   bool packed, int device)
        : parameters_{parameters}, to_{to}, receiver_{receiver_context{.device = device}} {
        const auto transport = benchmarks::take_long(parent);
        parts_.resize(parent.take<std::size_t>());
        for (auto& part : parts_) {
            part.first = parent.take<std::size_t>();
            part.count = parent.take<std::size_t>();
        }
        const auto message = cuda_ipc::trainer_init_info{.packed = packed}.init_message();
        receiver_.open(
            {.wire_parameters = message, .transport = transport, .parameters = &parameters},
            in_time(), {});
    }

    [[nodiscard]] arrived receive(const channel& parent) {
        arrived told;
        places to{&to_, coverage{parameters_}};
        ++round_;
        const auto before = device_allocations();
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            const auto& part = parts_[i];
            update_target target{to, parameters_, part.first, part.count};
            static_cast<void>(parent.take<bool>());  // the part is staged
            const auto begin = monotonic::now();
            const weightwire_tests::allocation_watch watch;
            receiver_.receive({.round = round_,
                               .part = i,
                               .first = part.first,
                               .count = part.count,
                               .native = true},
                              target, in_time(), {});
            told.host_allocations += watch.count();
            told.seconds += seconds_since(begin);
            parent.put(true);
        }
        told.device_allocations = device_allocations() - before;
        if (!to.seen.all_whole()) {
            throw std::runtime_error{"the round ended with tensors missing"};
        }
        return told;
    }
    [[nodiscard]] std::uint64_t table_bytes() const { return receiver_.table_bytes(); }
    void release() { receiver_.release(); }

private:
    const manifest& parameters_;
    const device_weights& to_;
    std::vector<update_part> parts_;
    std::uint64_t round_ = 0;
    cuda_ipc::receiver receiver_;
};

/// Of the digests of all tensors that readers see.
std::uint64_t digest_of(device_parameter_table& table, const manifest& parameters, int device) {
    const auto held = table.acquire(in_time());
    std::vector<gpu::digest_item> items(parameters.size());
    for (std::size_t i = 0; i < held.size(); ++i) {
        const auto tensor = held.tensor(i);
        items.at(parameters.find(held.name(i))) = {tensor.data(), tensor.byte_size()};
    }
    return benchmarks::digest_of_all(gpu::digest_plan{device, items}, gpu::stream{device});
}

void worker(const channel& parent, const settings& wanted) {
    const int device = wanted.worker_device;
    start_device(device);
    const manifest parameters{benchmarks::qwen3_30b_a3b_list(wanted.layers)};
    const device_weights landing{parameters, device, wanted.allocation_bytes};
    landing.overwrite();
    const auto table = make_table(parameters, landing, wanted.mode, device);
    worker_engine engine{cuda_ipc::backend{}, *table};
    worker_service service{engine};
    worker_server server{service, {}};
    server.start();
    parent.put(server.port());
    static_cast<void>(parent.take<bool>());  // the first round has ended
    parent.put(digest_of(*table, parameters, device));
    cuda_ipc::cuda_machinery machine{device};
    std::vector<cuda_ipc::cuda_machinery::mapping> mapped;
    for (std::size_t k = 0; k < landing.blocks().size(); ++k) {
        const auto sent = parent.take<ipc_pair::sent_export>();
        mapped.push_back(machine.open(sent.from(), sent.what()));
    }
    receiving_half half{parent, parameters, landing, wanted.packed, device};
    const mapped_copies copies{std::move(mapped), landing, device};
    for (;;) {
        const auto next = parent.take<turn>();
        if (next.end) {
            break;
        }
        landing.overwrite();
        parent.put(true);
        arrived told;
        if (next.what == way::whole) {
            const auto before = device_allocations();
            static_cast<void>(parent.take<bool>());  // the trainer's call has returned
            told.device_allocations = device_allocations() - before;
        } else if (next.what == way::halves) {
            told = half.receive(parent);
        } else {
            told.seconds = copies.run(next.what);
        }
        if (next.check && next.what != way::inside) {
            told.digest =
                next.what == way::whole ? digest_of(*table, parameters, device) : landing.digest();
        }
        parent.put(told);
    }
    parent.put(half.table_bytes());
    half.release();
    server.stop(in_time());
}

// --- The trainer.

/// Prints what was chosen.
struct chosen_events {
    void on(const event& what) const noexcept {
        if (what.kind == event_kind::chosen) {
            std::printf("chosen: %.*s\n", static_cast<int>(what.text.size()), what.text.data());
        }
    }
};

/// A sender without an engine.
class sending_half {
public:
    sending_half(const channel& child, const manifest& parameters, const device_weights& weights,
                 const cuda_ipc::trainer_init_info& info)
        : parameters_{parameters}, sender_{info} {
        const std::vector<tensor_view> stable(weights.views().begin(), weights.views().end());
        const std::vector<peer_info> peers{{.name = "worker", .native = true}};
        const auto inits = sender_.prepare({.parameters = parameters,
                                            .peers = peers,
                                            .world_size = 2,
                                            .lifetime = tensor_lifetime::stable,
                                            .stable_tensors = stable});
        promised_ = memory();
        benchmarks::put_long(child, inits.at(0).native);
        child.put(sender_.parts().size());
        for (const auto& part : sender_.parts()) {
            child.put(part.first);
            child.put(part.count);
        }
        sender_.open(in_time(), {});
        fmt::print("halves: {}; the worker is told {} bytes\n", sender_.description(),
                   inits.at(0).native.size());
    }

    void send(span_source& source, const channel& child) {
        ++round_;
        round_of<span_source> all{source, parameters_};
        auto tensors = all.stream();
        const auto before = device_allocations();
        const weightwire_tests::allocation_watch watch;
        for (std::size_t i = 0; i < sender_.parts().size(); ++i) {
            sender_.stage(round_, i, tensors, in_time(), {});
            child.put(true);
            sender_.send(round_, i, tensors, in_time(), {});
            static_cast<void>(child.take<bool>());
        }
        host_allocations_ = watch.count();
        device_allocations_ = device_allocations() - before;
    }

    [[nodiscard]] std::uint64_t memory() const {
        return sender_.allocated_bytes() + sender_.table_bytes();
    }
    [[nodiscard]] std::uint64_t promised() const noexcept { return promised_; }
    /// Of the last round, by the process and by the calling thread.
    [[nodiscard]] std::uint64_t device_allocations_of_round() const noexcept {
        return device_allocations_;
    }
    [[nodiscard]] std::uint64_t host_allocations() const noexcept { return host_allocations_; }
    void close() { sender_.close(in_time()); }

private:
    const manifest& parameters_;
    cuda_ipc::sender sender_;
    std::uint64_t promised_ = 0;
    std::uint64_t round_ = 0;
    std::uint64_t device_allocations_ = 0;
    std::uint64_t host_allocations_ = 0;
};

/// Counted rounds of a row.
struct measured {
    std::vector<double> taken{};
    std::vector<double> trainer{};  ///< its own call
    [[nodiscard]] bool has_run() const { return !taken.empty() && median(taken) > 0; }
};

/// Allocations from the third round on.
struct counted {
    std::uint64_t device = 0;  ///< of both processes, in rounds over HTTP
    std::uint64_t halves_device = 0;
    std::uint64_t sender_host = 0;    ///< of the thread that stages and sends
    std::uint64_t receiver_host = 0;  ///< of the thread that receives
    std::uint64_t trainer_host = 0;   ///< of the trainer's thread in send_weights()
    int rounds = 0;
};

/// Where a whole round's time goes.
struct phase_times {
    std::vector<double> start{};
    std::vector<double> update{};
    std::vector<double> finish{};
};

struct first_round {
    double init = 0;
    double send = 0;
};

class report {
public:
    report(const settings& wanted, const manifest& parameters, std::uint64_t padded_bytes)
        : wanted_{wanted},
          bytes_{static_cast<double>(parameters.total_bytes())},
          padded_{static_cast<double>(padded_bytes)} {
        fmt::print(
            "\nQwen3-30B-A3B list of {} layers: {} tensors, {:.1f} GB, {}{}, {}{}; medians of {} "
            "rounds after {}\n",
            wanted.layers, parameters.size(), bytes_ * 1e-9, wanted.packed ? "packed, " : "",
            to_string(wanted.mode),
            wanted.allocation_bytes == 0
                ? std::string{"one allocation"}
                : fmt::format("allocations of {} MiB", wanted.allocation_bytes >> 20U),
            wanted.worker_device == 0 ? "" : ", the worker on another GPU", wanted.rounds,
            warm_ups);
        fmt::print("{:<20} {:>9} {:>9} {:>9} {:>8} {:>7} {:>11}\n", "way", "ms", "fastest",
                   "slowest", "GB/s", "ratio", "trainer ms");
    }

    /// The rate that ratios are of: of the faster of copy calls and bulk kernel.
    void set_reference(const measured& calls, const measured& bulk) {
        reference_ = padded_ / median(calls.taken);
        if (bulk.has_run()) {
            reference_ = std::max(reference_, padded_ / median(bulk.taken));
        }
    }
    /// @returns the ratio.
    double row(std::string_view name, const measured& one, bool uniform) const {
        if (!one.has_run()) {
            fmt::print("{:<20} this device has no such form\n", name);
            return 0;
        }
        const auto rate = (uniform ? padded_ : bytes_) / median(one.taken);
        fmt::print("{:<20} {:>9.3f} {:>9.3f} {:>9.3f} {:>8.0f} {:>7.3f} {:>11}\n", name,
                   median(one.taken) * 1e3, *std::ranges::min_element(one.taken) * 1e3,
                   *std::ranges::max_element(one.taken) * 1e3, rate * 1e-9, rate / reference_,
                   one.trainer.empty() ? "-" : fmt::format("{:.3f}", median(one.trainer) * 1e3));
        return rate / reference_;
    }
    /// Nothing is asked of the ring, which is one more pass, nor of copy_in, whose commit copies.
    void verdict(std::string_view what, double found, double asked) const {
        if (wanted_.packed || wanted_.mode == commit_mode::copy_in) {
            return;
        }
        fmt::print("{}: {:.3f} of the faster of copy calls and bulk kernel; asked {:.2f}: {}\n",
                   what, found, asked, found >= asked ? "reached" : "MISSED");
    }

private:
    settings wanted_;
    double bytes_;
    double padded_;
    double reference_ = 1;
};

void print_all(const settings& wanted, const manifest& parameters, std::uint64_t padded,
               const std::array<measured, ways.size()>& rows, const measured& data,
               const phase_times& phases, const first_round& first, const counted& allocations) {
    report out{wanted, parameters, padded};
    const auto of = [&](way what) -> const measured& {
        return rows[static_cast<std::size_t>(what)];
    };
    out.set_reference(of(way::calls), of(way::bulk));
    for (const auto what : ways) {
        if (what != way::whole) {
            out.row(names[static_cast<std::size_t>(what)], of(what), what != way::halves);
        }
    }
    const auto data_ratio = out.row("data phase", data, false);
    const auto whole = out.row(names[static_cast<std::size_t>(way::whole)], of(way::whole), false);
    fmt::print("send_weights(): start {:.3f} ms, update {:.3f} ms, finish {:.3f} ms\n",
               median(phases.start) * 1e3, median(phases.update) * 1e3,
               median(phases.finish) * 1e3);
    out.verdict("data phase", data_ratio, asked_data);
    out.verdict("send_weights()", whole, asked_whole);
    const auto later = median(of(way::whole).taken);
    const auto more = first.init + first.send - later;
    fmt::print(
        "first round: init {:.1f} ms and send_weights() {:.1f} ms, {:.1f} ms more than later ones; "
        "asked below {:.0f} ms: {}\n",
        first.init * 1e3, first.send * 1e3, more * 1e3, asked_first_seconds * 1e3,
        more < asked_first_seconds ? "reached" : "MISSED");
    fmt::print(
        "allocations in {} rounds, from the third on: device and pinned {} over HTTP, {} of the "
        "halves; operator new {} of the sender's thread, {} of the receiver's, {} a round of the "
        "trainer's in send_weights()\n",
        allocations.rounds, allocations.device, allocations.halves_device, allocations.sender_host,
        allocations.receiver_host,
        allocations.rounds == 0
            ? 0
            : allocations.trainer_host / static_cast<std::uint64_t>(allocations.rounds));
    // For cuda_ipc_vllm.py.
    fmt::print("result: data phase {:.3f} ms, send_weights() {:.3f} ms, {} layers\n",
               median(data.taken) * 1e3, later * 1e3, wanted.layers);
}

int trainer(const channel& child, const settings& wanted) {
    start_device(0);
    const manifest parameters{benchmarks::qwen3_30b_a3b_list(wanted.layers)};
    const device_weights weights{parameters, 0, wanted.allocation_bytes};
    weights.overwrite(0x11);
    std::vector<named_tensor> tensors;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        tensors.push_back({.name = parameters[i].name, .tensor = weights.views()[i]});
    }
    span_source source{tensors};
    http_sync_client client{fmt::format("http://127.0.0.1:{}", child.take<std::uint16_t>())};
    const cuda_ipc::trainer_init_info info{.packed = wanted.packed};
    const auto memory_before = used_device_memory();
    first_round first;
    auto begin = monotonic::now();
    auto engine =
        trainer_init(info, client, source, trainer_options{}, single_rank{}, chosen_events{});
    first.init = seconds_since(begin);
    begin = monotonic::now();
    static_cast<void>(engine.send_weights());
    first.send = seconds_since(begin);
    const auto memory_after_first = used_device_memory();
    int wrong = 0;
    child.put(true);
    if (child.take<std::uint64_t>() != weights.digest()) {
        ++wrong;
        fmt::print("first round: digests DIFFER\n");
    }
    cuda_ipc::cuda_machinery machine{0};
    for (const auto& block : weights.blocks()) {
        child.put(ipc_pair::exported(machine, block.data(), block.size()));
    }
    sending_half half{child, parameters, weights, info};
    std::array<measured, ways.size()> rows;
    measured data;
    phase_times phases;
    counted allocations;
    for (int round = 0; round < warm_ups + wanted.rounds; ++round) {
        const bool check = round % wanted.check_every == 0;
        weights.fill(static_cast<std::uint64_t>(round) + 1);
        const auto expected = check ? weights.digest() : std::uint64_t{0};
        allocations.rounds += round >= 2 ? 1 : 0;
        for (std::size_t k = 0; k < ways.size(); ++k) {
            const auto index = benchmarks::row_of(round, k, ways.size());
            const auto what = ways[index];
            child.put(turn{.what = what, .check = check});
            static_cast<void>(child.take<bool>());
            const auto device_before = device_allocations();
            sync_report told_by_engine;
            double own = 0;
            begin = monotonic::now();
            if (what == way::whole) {
                const weightwire_tests::allocation_watch watch;
                told_by_engine = engine.send_weights();
                own = seconds_since(begin);
                allocations.trainer_host += round >= 2 ? watch.count() : 0;
                allocations.device += round >= 2 ? device_allocations() - device_before : 0;
                child.put(true);
            } else if (what == way::halves) {
                half.send(source, child);
                own = seconds_since(begin);
            }
            const auto told = child.take<arrived>();
            if (check && what != way::inside && told.digest != expected) {
                ++wrong;
                fmt::print("{}: digests DIFFER in round {}\n", names[index], round + 1);
            }
            if (round >= 2 && what == way::whole) {
                allocations.device += told.device_allocations;
            }
            if (round >= 2 && what == way::halves) {
                allocations.halves_device +=
                    told.device_allocations + half.device_allocations_of_round();
                allocations.sender_host += half.host_allocations();
                allocations.receiver_host += told.host_allocations;
            }
            if (round < warm_ups) {
                continue;
            }
            rows[index].taken.push_back(what == way::whole ? own : told.seconds);
            if (what == way::whole) {
                data.taken.push_back(told_by_engine.data_seconds);
                phases.start.push_back(told_by_engine.start.seconds);
                phases.update.push_back(told_by_engine.update.seconds);
                phases.finish.push_back(told_by_engine.finish.seconds);
            } else if (what == way::halves) {
                rows[index].trainer.push_back(own);
            }
        }
    }
    const auto memory_at_end = used_device_memory();
    engine.close(in_time());
    child.put(turn{.end = true});
    const auto receiver_tables = child.take<std::uint64_t>();
    print_all(wanted, parameters, weights.allocated_bytes(), rows, data, phases, first,
              allocations);
    fmt::print(
        "device memory: sender {} bytes promised before its first round, {} used; receiver's "
        "tables {} bytes; of the device {:.1f} MB more in use after the first round than before "
        "init, {:.1f} MB at the end, the benchmark's own tables among them\n",
        half.promised(), half.memory(), receiver_tables, memory_after_first - memory_before,
        memory_at_end - memory_before);
    half.close();
    fmt::print("{}\n", wrong == 0 ? "digests of every tensor were equal after every check"
                                  : "digests DIFFERED");
    return wrong;
}

/// @returns whether it is more than none.
bool read_count(std::string_view value, int& to) {
    return benchmarks::read_number(value, to) && to > 0;
}

bool read_mode(std::string_view value, commit_mode& to) {
    for (const auto mode : {commit_mode::in_place, commit_mode::flip, commit_mode::copy_in}) {
        if (to_string(mode) == value) {
            to = mode;
            return true;
        }
    }
    return false;
}

}  // namespace

int main(int argc, char** argv) try {
    settings wanted;
    if (!benchmarks::read_options(
            "cuda_ipc_round", argc, argv,
            {{"--packed", &wanted.packed},
             {"--layers", &wanted.layers},
             {"--worker-device", &wanted.worker_device},
             {"--allocation", benchmarks::mebibytes{&wanted.allocation_bytes}},
             {"--rounds", [&](auto value) { return read_count(value, wanted.rounds); }},
             {"--check-every", [&](auto value) { return read_count(value, wanted.check_every); }},
             {"--mode", [&](auto value) { return read_mode(value, wanted.mode); }}})) {
        return 2;
    }
    const int wrong = benchmarks::run_pair(
        "cuda_ipc_round", [&](channel& child) { return trainer(child, wanted); },
        [&](channel& parent) { worker(parent, wanted); });
    return wrong == 0 ? 0 : 1;
} catch (const std::exception& failed) {
    fmt::print(stderr, "cuda_ipc_round: {}\n", failed.what());
    return 1;
}

// Last, as its names are short: the operator new that counts.
#include "../tests/support/allocations.cpp"
