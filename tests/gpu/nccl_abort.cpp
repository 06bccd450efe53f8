// SPDX-License-Identifier: Apache-2.0
//
// What is left of a rank whose only peer was killed, stopped or wedged, at each step: what NCCL
// tells the survivor, how long ncclCommAbort takes, whether stream and device are usable after it,
// and whether the same process can join a fresh group. The error path of nccl_api/communicator.hpp
// stands on this table. NCCL is called directly here, without that class.
//
// usage: nccl_abort [--two-gpus] [--only STEP] [--queued BROADCASTS]

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <weightwire/gpu/device_buffer.hpp>
#include <weightwire/gpu/event.hpp>
#include <weightwire/gpu/stream.hpp>
#include <weightwire/nccl_api/abort.hpp>
#include <weightwire/nccl_api/error.hpp>
#include <weightwire/nccl_api/library.hpp>
#include <weightwire/nccl_api/nccl.hpp>

#include "nccl_pair.hpp"

namespace {

using namespace std::chrono_literals;
namespace gpu = weightwire::gpu;
namespace nccl_api = weightwire::nccl_api;

enum class step { healthy, before, init, warm_up, broadcast };
enum class fault { none, killed, stopped, wedged, aborted };
constexpr const char* step_names[] = {"healthy", "before init", "init", "warm-up", "broadcast"};
constexpr const char* fault_names[] = {"none", "killed", "stopped", "wedged", "aborted"};

struct scenario {
    step at = step::healthy;
    fault what = fault::none;
    int survivor = 0;  ///< its rank; rank 0 sends and serves the meeting
    int delay = 0;     ///< milliseconds from the start of the step to the fault
};

struct observation {
    double joined = -1;    ///< milliseconds that the join took, -1: it did not end
    double warmed = -1;    ///< milliseconds of the warm-up
    double posting = -1;   ///< microseconds of the host for each small broadcast
    double seen = 0;       ///< when the result below was there; the clock of `now`
    int result = 0;        ///< NCCL's, ncclInProgress: nothing was reported
    bool done = false;     ///< the step ended as if nothing had happened
    double abort = -1;     ///< milliseconds, -1: not within 20 s
    int stream = -1;       ///< cudaStreamQuery after the abort
    int device = -1;       ///< allocation, memset and synchronisation after it
    double rejoined = -1;  ///< milliseconds of a fresh join with a broadcast that was right
    char words[160] = {};
};

bool one_device = true;
int queued = 256;  ///< broadcasts that are given to the stream before the fault
constexpr std::size_t large = std::size_t{64} << 20U;

[[nodiscard]] double now() {
    return std::chrono::duration<double, std::milli>{
        std::chrono::steady_clock::now().time_since_epoch()}
        .count();
}

/// One rank: the plain calls.
struct rank_calls {
    nccl_api::library used;
    int device;
    gpu::stream stream;
    gpu::device_buffer memory;
    ncclComm_t comm = nullptr;

    explicit rank_calls(int rank)
        : used{nccl_pair::open_library()},
          device{nccl_pair::choose_device(rank, one_device)},
          stream{device},
          memory{device, large} {}

    [[nodiscard]] ncclUniqueId make_id() const {
        ncclUniqueId id{};
        const auto before = nccl_api::detail::digest_of_words(used);
        nccl_api::check(used, used.calls().get_unique_id(&id), "ncclGetUniqueId", before);
        return id;
    }
    /// Polls until the call is no longer in progress, at most `limit`.
    [[nodiscard]] ncclResult_t progress(ncclResult_t result,
                                        std::chrono::milliseconds limit) const {
        const double until = now() + static_cast<double>(limit.count());
        while (result == ncclInProgress) {
            if (used.calls().get_async_error(comm, &result) != ncclSuccess) {
                return ncclInternalError;
            }
            if (now() > until) {
                break;
            }
            std::this_thread::yield();
        }
        return result;
    }
    [[nodiscard]] ncclResult_t join(const ncclUniqueId& id, int rank,
                                    std::chrono::milliseconds limit) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        return progress(used.calls().init_rank_config(&comm, 2, id, rank, &config), limit);
    }
    [[nodiscard]] ncclResult_t post_all_reduce() const {
        return used.calls().all_reduce(memory.data(), memory.data(), 1, ncclFloat32, ncclSum, comm,
                                       stream.native_handle());
    }
    [[nodiscard]] ncclResult_t post_broadcast(std::size_t bytes) const {
        return used.calls().broadcast(memory.data(), memory.data(), bytes, ncclUint8, 0, comm,
                                      stream.native_handle());
    }
    /// Until the stream is idle or an error is reported, at most `limit`.
    [[nodiscard]] ncclResult_t finish(std::chrono::milliseconds limit, bool& done) const {
        const double until = now() + static_cast<double>(limit.count());
        ncclResult_t result = ncclSuccess;
        done = false;
        for (;;) {
            const cudaError_t status = cudaStreamQuery(stream.native_handle());
            static_cast<void>(used.calls().get_async_error(comm, &result));
            done = status == cudaSuccess;
            if (done || (result != ncclSuccess && result != ncclInProgress) || now() > until ||
                (status != cudaSuccess && status != cudaErrorNotReady)) {
                return done || result != ncclSuccess ? result : ncclInProgress;
            }
            std::this_thread::sleep_for(200us);
        }
    }
    [[nodiscard]] ncclResult_t warm_up(std::chrono::milliseconds limit, bool& done) const {
        const ncclResult_t result = progress(post_all_reduce(), limit);
        return result == ncclSuccess ? finish(limit, done) : result;
    }
    /// Enough broadcasts to be in one when the fault comes.
    [[nodiscard]] ncclResult_t broadcasts(std::chrono::milliseconds limit, bool& done) const {
        const double until = now() + static_cast<double>(limit.count());
        for (int i = 0; i < queued; ++i) {
            const auto left = std::chrono::milliseconds{static_cast<int>(until - now()) + 1};
            if (const ncclResult_t result = progress(post_broadcast(large), left);
                result != ncclSuccess) {
                return result;
            }
        }
        return finish(std::chrono::milliseconds{static_cast<int>(until - now()) + 1}, done);
    }
};

void sleep_until_killed() {
    for (;;) {
        std::this_thread::sleep_for(1h);
    }
}

/// The rank that fails. Its parent kills or stops it.
void fail(const scenario& what, tests::channel& parent) {
    const int rank = 1 - what.survivor;
    rank_calls calls{rank};
    ncclUniqueId id{};
    if (rank == 0) {
        parent.put(calls.make_id());
    }
    parent.put(true);
    id = parent.take<ncclUniqueId>();
    if (what.at == step::before) {
        sleep_until_killed();
    }
    bool done = false;
    const ncclResult_t joined = calls.join(id, rank, 30s);
    if (what.at == step::init) {
        sleep_until_killed();
    }
    if (joined == ncclSuccess && what.at != step::warm_up) {
        static_cast<void>(calls.warm_up(30s, done));
    }
    parent.put(true);
    static_cast<void>(parent.take<bool>());
    if (what.at == step::broadcast && what.what != fault::wedged && what.what != fault::aborted) {
        static_cast<void>(calls.broadcasts(60s, done));
    }
    if (what.what == fault::aborted) {
        std::this_thread::sleep_for(std::chrono::milliseconds{what.delay});
        static_cast<void>(calls.used.calls().abort(calls.comm));
    }
    if (what.at == step::healthy) {
        for (int i = 0; i < 2000; ++i) {
            static_cast<void>(calls.progress(calls.post_broadcast(4096), 1s));
        }
        static_cast<void>(calls.finish(10s, done));
    }
    sleep_until_killed();
}

/// A fresh peer for the survivor: joins as rank 1, on the lost peer's device, and checks what it
/// gets.
void help(int device_rank, tests::channel& parent) {
    rank_calls calls{device_rank};
    parent.put(true);
    const auto id = parent.take<ncclUniqueId>();
    bool done = false;
    bool right = calls.join(id, 1, 15s) == ncclSuccess;
    right = right && calls.warm_up(15s, done) == ncclSuccess &&
            calls.progress(calls.post_broadcast(4096), 5s) == ncclSuccess &&
            calls.finish(5s, done) == ncclSuccess && done;
    std::vector<unsigned char> bytes(4096);
    gpu::check(cudaMemcpy(bytes.data(), calls.memory.data(), bytes.size(), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    for (const unsigned char byte : bytes) {
        right = right && byte == 0x5a;
    }
    parent.put(right);
    sleep_until_killed();
}

/// The survivor's last step: abort, look at stream and device, join again on the same memory.
void recover(rank_calls& calls, observation& seen, tests::channel& parent) {
    const double before = now();
    if (nccl_api::detail::abort_within(calls.used, calls.comm, calls.device, 20s)) {
        seen.abort = now() - before;
    }
    seen.stream = static_cast<int>(cudaStreamQuery(calls.stream.native_handle()));
    void* fresh = nullptr;
    cudaError_t status = cudaMalloc(&fresh, 1 << 20);
    status = status == cudaSuccess ? cudaMemset(calls.memory.data(), 0x5a, 4096) : status;
    status = status == cudaSuccess ? cudaDeviceSynchronize() : status;
    seen.device = static_cast<int>(status);
    parent.put(seen);
    static_cast<void>(parent.take<bool>());
    const double start = now();
    const ncclUniqueId id = calls.make_id();
    parent.put(id);
    bool done = false;
    const bool again =
        calls.join(id, 0, 15s) == ncclSuccess && calls.warm_up(15s, done) == ncclSuccess &&
        cudaMemsetAsync(calls.memory.data(), 0x5a, 4096, calls.stream.native_handle()) ==
            cudaSuccess &&
        calls.progress(calls.post_broadcast(4096), 5s) == ncclSuccess &&
        calls.finish(5s, done) == ncclSuccess && done;
    parent.put(again ? now() - start : -1.0);
    sleep_until_killed();
}

void survive(const scenario& what, tests::channel& parent) {
    rank_calls calls{what.survivor};
    if (what.survivor == 0) {
        parent.put(calls.make_id());
    }
    parent.put(true);
    const auto id = parent.take<ncclUniqueId>();
    observation seen;
    constexpr auto watch = 1500ms;
    const double start = now();
    ncclResult_t result = calls.join(id, what.survivor, what.at <= step::init ? 2000ms : 20s);
    if (result == ncclSuccess) {
        seen.joined = now() - start;
        seen.done = true;
    }
    if (result == ncclSuccess && what.at == step::init) {  // too late a fault: seen in the warm-up
        seen.done = false;
        result = calls.warm_up(watch, seen.done);
    }
    if (what.at != step::init && what.at != step::before) {
        if (result == ncclSuccess && what.at != step::warm_up) {
            const double begun = now();
            result = calls.warm_up(20s, seen.done);
            seen.warmed = now() - begun;
        }
        parent.put(true);
        static_cast<void>(parent.take<bool>());
        seen.done = false;
        if (result == ncclSuccess && what.at == step::warm_up) {
            result = calls.warm_up(watch, seen.done);
        } else if (result == ncclSuccess && what.at == step::broadcast) {
            result = calls.broadcasts(watch, seen.done);
        } else if (result == ncclSuccess) {
            for (int i = 0; i < 1000; ++i) {
                static_cast<void>(calls.progress(calls.post_broadcast(4096), 1s));
            }
            const double begun = now();
            for (int i = 0; i < 1000; ++i) {
                static_cast<void>(calls.progress(calls.post_broadcast(4096), 1s));
            }
            seen.posting = now() - begun;
            result = calls.finish(10s, seen.done);
        }
    }
    seen.seen = now();
    seen.result = static_cast<int>(result);
    if (result != ncclInProgress && result != ncclSuccess) {
        std::strncpy(seen.words, nccl_api::last_words(calls.used).c_str(), sizeof seen.words - 1);
    }
    recover(calls, seen, parent);
}

void print(const scenario& what, const observation& seen, double fault_time) {
    char after[32] = "-";
    if (seen.result != ncclInProgress && seen.result != ncclSuccess) {
        std::snprintf(after, sizeof after, "%.0f ms", seen.seen - fault_time);
    }
    char result[32];
    std::snprintf(result, sizeof result, "%s",
                  seen.result == ncclInProgress ? "nothing"
                  : seen.result == ncclSuccess  ? (seen.done ? "success" : "nothing")
                                                : ("error " + std::to_string(seen.result)).c_str());
    std::printf("%-11s %-8s %5d ms  %d  %-8s %8s %9.1f ms %5d %6d %8.0f ms  %s\n",
                step_names[static_cast<int>(what.at)], fault_names[static_cast<int>(what.what)],
                what.delay, what.survivor, result, after, seen.abort, seen.stream, seen.device,
                seen.rejoined, seen.words);
    if (what.at == step::healthy) {
        std::printf(
            "  healthy: join %.0f ms, warm-up %.0f ms, %.1f us of the host a small "
            "broadcast\n",
            seen.joined, seen.warmed, seen.posting);
    }
    std::fflush(stdout);
}

/// One scenario in two fresh processes, then a third for the join afterwards.
void play(const scenario& what) {
    tests::forked peer{[&](tests::channel& parent) { fail(what, parent); }};
    tests::forked survivor{[&](tests::channel& parent) { survive(what, parent); }};
    tests::forked& first = what.survivor == 0 ? survivor : peer;
    const auto id = first.to().take<ncclUniqueId>();
    static_cast<void>(peer.to().take<bool>());
    static_cast<void>(survivor.to().take<bool>());
    peer.to().put(id);
    survivor.to().put(id);
    if (what.at != step::init && what.at != step::before) {
        static_cast<void>(peer.to().take<bool>());
        static_cast<void>(survivor.to().take<bool>());
        peer.to().put(true);
        if (what.at != step::warm_up) {
            survivor.to().put(true);
        }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds{what.delay});
    const double fault_time = now();
    if (what.what == fault::killed) {
        peer.kill();
    } else if (what.what == fault::stopped) {
        peer.stop();
    }
    if (what.at == step::warm_up) {  // it posts once the peer is gone
        survivor.to().put(true);
    }
    auto seen = survivor.to().take<observation>();
    peer.kill();
    tests::forked helper{[&](tests::channel& parent) { help(1 - what.survivor, parent); }};
    static_cast<void>(helper.to().take<bool>());
    survivor.to().put(true);
    helper.to().put(survivor.to().take<ncclUniqueId>());
    seen.rejoined = survivor.to().take<double>();
    if (!helper.to().take<bool>()) {
        seen.rejoined = -1;
    }
    print(what, seen, fault_time);
}

std::vector<scenario> scenarios() {
    std::vector<scenario> list;
    for (const int survivor : {0, 1}) {
        list.push_back({step::healthy, fault::none, survivor, 0});
        list.push_back({step::before, fault::wedged, survivor, 0});
        for (const fault what : {fault::killed, fault::stopped}) {
            for (const int delay : {5, 60, 200}) {
                list.push_back({step::init, what, survivor, delay});
            }
        }
        for (const fault what : {fault::killed, fault::stopped, fault::wedged, fault::aborted}) {
            list.push_back({step::warm_up, what, survivor, 0});
        }
        for (const fault what : {fault::killed, fault::stopped, fault::wedged, fault::aborted}) {
            list.push_back({step::broadcast, what, survivor, 150});
        }
    }
    return list;
}

}  // namespace

int main(int count, char** words) {
    std::string_view only;
    for (int i = 1; i < count; ++i) {
        const std::string_view word{words[i]};
        if (word == "--two-gpus") {
            one_device = false;
        } else if (word == "--only" && i + 1 < count) {
            only = words[++i];
        } else if (word == "--queued" && i + 1 < count) {
            queued = std::atoi(words[++i]);
        } else {
            std::fprintf(stderr,
                         "usage: nccl_abort [--two-gpus] [--only STEP] [--queued BROADCASTS]\n");
            return 2;
        }
    }
    if (nccl_pair::usable_devices() < (one_device ? 1 : 2)) {
        std::printf("SKIP: too few CUDA devices, or no libnccl\n");
        return 77;
    }
    std::printf("NCCL %s, %s, %d broadcasts of 64 MiB queued\n",
                nccl_api::version_text(nccl_pair::open_library().version()).c_str(),
                one_device ? "both ranks on one GPU, loopback sockets" : "a GPU for each rank",
                queued);
    std::printf("%-11s %-8s %8s  %s  %-8s %8s %12s %5s %6s %11s  %s\n", "step", "peer", "after",
                "rank", "NCCL", "after", "abort", "strm", "device", "join again", "its words");
    int broken = 0;
    for (const scenario& each : scenarios()) {
        if (!only.empty() && only != step_names[static_cast<int>(each.at)]) {
            continue;
        }
        try {
            play(each);
        } catch (const std::exception& failed) {
            ++broken;
            std::printf("%-11s %-8s %5d ms  %d  the case did not end: %s\n",
                        step_names[static_cast<int>(each.at)],
                        fault_names[static_cast<int>(each.what)], each.delay, each.survivor,
                        failed.what());
            std::fflush(stdout);
        }
    }
    return broken == 0 ? 0 : 1;
}
