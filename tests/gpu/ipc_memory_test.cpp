// SPDX-License-Identifier: Apache-2.0
//
// What CUDA does with memory of another process, where two processes share device 0. What differs
// between drivers is printed; what a user relies on is checked. The suite's own process never uses
// CUDA: each test forks its exporter and importer.

#include <doctest/doctest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <weightwire/core/error.hpp>
#include <weightwire/gpu/check.hpp>
#include <weightwire/gpu/driver.hpp>
#include <weightwire/gpu/ipc_memory.hpp>

#include "ipc_pair.hpp"

namespace {

namespace gpu = weightwire::gpu;
namespace cuda_ipc = weightwire::cuda_ipc;
using cuda_ipc::byte_move;
using cuda_ipc::cuda_machinery;
using ipc_pair::sent_export;
using tests::channel;
using tests::forked;

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20U;

bool have_device(const char* test) {
    ::signal(SIGPIPE, SIG_IGN);  // a process that ended shows by what it did not answer
    static const int devices = ipc_pair::usable_devices();
    if (devices > 0) {
        return true;
    }
    std::printf("SKIP %s: this machine has no CUDA device\n", test);
    return false;
}

/// How an opening ended: with memory, or with an error.
struct opening {
    std::array<char, 16> kind{};  ///< the error's word; empty where memory came
    int code = 0;                 ///< CUDA's
    std::array<char, 200> words{};

    [[nodiscard]] std::string error() const { return kind.data(); }
};

template <std::size_t Size>
void put_words(std::array<char, Size>& to, std::string_view text) {
    std::copy_n(text.begin(), std::min(text.size(), Size - 1), to.begin());
}

opening tried(cuda_machinery& machine, const cuda_ipc::exporter& from,
              const cuda_ipc::exported_allocation& what) {
    opening result;
    try {
        static_cast<void>(machine.open(from, what));
    } catch (const weightwire::error& failure) {
        put_words(result.kind, failure.kind());
        put_words(result.words, failure.what());
        result.code = failure.context().native_code;
    }
    return result;
}

void print(const char* what, const opening& result) {
    std::printf("  %-44s %s\n", what,
                result.kind[0] == '\0' ? "opens" : static_cast<const char*>(result.words.data()));
}

/// Tensors of the first test: of many sizes, at any addresses.
struct piece {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};

constexpr std::uint64_t arena_bytes = 256 * mebibyte;

std::vector<piece> pieces() {
    std::mt19937_64 random{3};
    std::vector<piece> list;
    for (std::uint64_t at = 0; list.size() < 1000;) {
        const std::uint64_t bytes = 1 + random() % 200'000;
        list.push_back({.offset = at, .bytes = bytes});
        at += bytes + random() % 40;
    }
    return list;
}

struct many_tensors {
    std::uint64_t distinct_exports = 0;
    std::uint64_t open_allocations = 0;
    std::uint64_t wrong_addresses = 0;
    std::uint64_t wrong_tensors = 0;  ///< in all forms together
    std::uint64_t left_open = 0;
    std::uint64_t small_wrong = 0;
    std::uint64_t small_mapped[2] = {};
    opening lie{};
    bool usable = false;
};

struct two_small {
    sent_export first{};
    sent_export second{};
    std::uint64_t digests[2] = {};
};
constexpr std::array<std::uint64_t, 2> small_bytes{4096, 8296};

void export_many(channel& parent) {
    cuda_machinery machine{0};
    const ipc_pair::filler fill;
    const auto arena = machine.allocate_exportable(arena_bytes);
    const auto stream = machine.make_stream();
    fill.fill(arena.data(), arena_bytes, 1, stream);
    auto filled = machine.make_event();
    machine.record_after(filled, stream.native_handle());
    ipc_pair::wait_for(machine, filled);
    std::vector<sent_export> distinct;
    for (const piece& each : pieces()) {
        const auto made = ipc_pair::exported(machine, arena.data() + each.offset, each.bytes);
        if (distinct.empty() || distinct.back().handle != made.handle ||
            distinct.back().base != made.base) {
            distinct.push_back(made);
        }
    }
    parent.put(static_cast<std::uint64_t>(distinct.size()));
    parent.put(distinct.front());
    std::vector<ipc_pair::device_bytes> tensors;
    for (const piece& each : pieces()) {
        tensors.push_back({arena.data() + each.offset, each.bytes});
    }
    for (const std::uint64_t digest : ipc_pair::digests_of(machine, tensors)) {
        parent.put(digest);
    }
    // The driver may put small allocations into one block.
    const auto first = machine.allocate_exportable(small_bytes[0]);
    const auto second = machine.allocate_exportable(small_bytes[1]);
    fill.fill(first.data(), small_bytes[0], 2, stream);
    fill.fill(second.data(), small_bytes[1], 3, stream);
    stream.synchronize();
    two_small small{.first = ipc_pair::exported(machine, first.data(), small_bytes[0]),
                    .second = ipc_pair::exported(machine, second.data(), small_bytes[1])};
    small.digests[0] = ipc_pair::digest_of(machine, first.data(), small_bytes[0]);
    small.digests[1] = ipc_pair::digest_of(machine, second.data(), small_bytes[1]);
    parent.put(small);
    static_cast<void>(parent.take<char>());  // until the importer is done
}

void import_small(cuda_machinery& machine, const two_small& small, many_tensors& result) {
    const std::array both{&small.first, &small.second};
    for (std::size_t i = 0; i < 2; ++i) {
        const auto mapped = machine.open(both[i]->from(), both[i]->what());
        result.small_mapped[i] = gpu::mapped_bytes_from(mapped.data());
        const auto here = machine.allocate_exportable(small_bytes[i]);
        ipc_pair::copy_now(machine, {{here.data(), mapped.data(), small_bytes[i]}});
        result.small_wrong +=
            ipc_pair::digest_of(machine, here.data(), small_bytes[i]) != small.digests[i] ? 1 : 0;
    }
}

void import_many(channel& parent) {
    const auto list = pieces();
    many_tensors result{.distinct_exports = parent.take<std::uint64_t>()};
    const auto sent = parent.take<sent_export>();
    std::vector<std::uint64_t> wanted;
    for (std::size_t i = 0; i < list.size(); ++i) {
        wanted.push_back(parent.take<std::uint64_t>());
    }
    const auto small = parent.take<two_small>();
    cuda_machinery machine{0};
    machine.load_kernels();
    {
        std::vector<cuda_machinery::mapping> mappings;
        for (std::size_t i = 0; i < list.size(); ++i) {
            mappings.push_back(machine.open(sent.from(), sent.what()));
            result.wrong_addresses += mappings.back().data() != mappings.front().data() ||
                                              mappings.back().size() != arena_bytes
                                          ? 1
                                          : 0;
        }
        result.open_allocations = gpu::detail::open_imports(0).size();
        auto lie = sent.what();
        lie.bytes += 1;
        result.lie = tried(machine, sent.from(), lie);
        const auto here = machine.allocate_exportable(arena_bytes);
        const auto stream = machine.make_stream();
        for (const auto form : {gpu::copy_form::plain, gpu::copy_form::bulk}) {
            if (form == gpu::copy_form::bulk && gpu::compute_capability(0) < 90) {
                continue;
            }
            machine.set_copy_form(form);
            gpu::clear_bytes(here.data(), arena_bytes, stream);
            // To other alignments than they have there.
            std::vector<std::vector<byte_move>> groups(3);
            std::vector<ipc_pair::device_bytes> arrived;
            std::uint64_t at = 0;
            for (std::size_t i = 0; i < list.size(); ++i) {
                groups[i % 3].push_back(
                    {here.data() + at, mappings[i].data() + list[i].offset, list[i].bytes});
                arrived.push_back({here.data() + at, list[i].bytes});
                at += list[i].bytes + i % 5;
            }
            const auto plan = machine.make_copies(groups);
            for (std::size_t g = 0; g < groups.size(); ++g) {
                plan.launch(g, stream);
            }
            auto done = machine.make_event();
            machine.record(done, stream);
            ipc_pair::wait_for(machine, done);
            const auto found = ipc_pair::digests_of(machine, arrived);
            for (std::size_t i = 0; i < list.size(); ++i) {
                result.wrong_tensors += found[i] != wanted[i] ? 1 : 0;
            }
        }
        import_small(machine, small, result);
    }
    result.left_open = gpu::detail::open_imports(0).size();
    result.usable = ipc_pair::is_device_usable();
    parent.put(result);
    static_cast<void>(parent.take<char>());
}

}  // namespace

TEST_CASE("one allocation with a thousand tensors is exported and opened once, and read right") {
    if (!have_device("one allocation with a thousand tensors")) {
        return;
    }
    forked exporter{ipc_pair::told(export_many)};
    forked importer{ipc_pair::told(import_many)};
    importer.to().put(exporter.to().take<std::uint64_t>());
    importer.to().put(exporter.to().take<sent_export>());
    for (std::size_t i = 0; i < pieces().size(); ++i) {
        importer.to().put(exporter.to().take<std::uint64_t>());
    }
    importer.to().put(exporter.to().take<two_small>());
    const auto result = importer.to().take<many_tensors>();
    CHECK(result.distinct_exports == 1);
    CHECK(result.open_allocations == 1);
    CHECK(result.wrong_addresses == 0);
    CHECK(result.wrong_tensors == 0);
    CHECK(result.small_wrong == 0);
    CHECK(result.left_open == 0);
    CHECK(result.usable);
    CHECK(result.lie.error() == "protocol");
    CHECK(std::string{result.lie.words.data()}.find(std::to_string(arena_bytes + 1)) !=
          std::string::npos);
    print("a size that is a byte too large:", result.lie);
    std::printf("  mapped of allocations of %llu and %llu bytes:  %llu and %llu bytes\n",
                static_cast<unsigned long long>(small_bytes[0]),
                static_cast<unsigned long long>(small_bytes[1]),
                static_cast<unsigned long long>(result.small_mapped[0]),
                static_cast<unsigned long long>(result.small_mapped[1]));
}

namespace {

struct same_process {
    bool is_pointer = false;
    bool is_pointer_without_start_time = false;
    std::uint64_t opened = 0;
    opening unknown{};    ///< a handle that nobody exported, said to be of this process
    opening own{};        ///< one that was made here, but not by this library
    opening elsewhere{};  ///< an export with another address
    opening beyond{};     ///< with a larger size
    opening short_handle{};
    opening stranger{};  ///< bytes of nobody, said to be of a living process
    opening freed{};
    bool usable = false;
};

void open_own(channel& parent) {
    same_process result;
    cuda_machinery machine{0};
    const auto self = weightwire::shm::this_process();
    auto memory = machine.allocate_exportable(4 * mebibyte);
    const auto made = ipc_pair::exported(machine, memory.data() + 100, 1000);
    const auto good = made.what();
    result.is_pointer = machine.open(self, good).data() == memory.data();
    result.is_pointer_without_start_time =
        machine.open({self.pid, 0}, good).data() == memory.data();
    auto wrong = good;
    wrong.base += 256;
    result.elsewhere = tried(machine, self, wrong);
    wrong = good;
    wrong.bytes += 1;
    result.beyond = tried(machine, self, wrong);
    wrong = good;
    wrong.handle.resize(66);
    result.short_handle = tried(machine, self, wrong);
    wrong.handle.assign(64, '\x5a');
    result.unknown = tried(machine, self, wrong);
    result.stranger = tried(machine, {::getppid(), 0}, wrong);
    const auto other = machine.allocate_exportable(4 * mebibyte);
    cudaIpcMemHandle_t handle{};
    gpu::check(cudaIpcGetMemHandle(&handle, other.data()), "cudaIpcGetMemHandle");
    std::memcpy(wrong.handle.data(), &handle, sizeof handle);
    wrong.base = reinterpret_cast<std::uint64_t>(other.data());
    result.own = tried(machine, self, wrong);
    result.opened = gpu::detail::open_imports(0).size();
    memory = {};
    result.freed = tried(machine, self, good);
    result.usable = ipc_pair::is_device_usable();
    parent.put(result);
    static_cast<void>(parent.take<char>());
}

}  // namespace

TEST_CASE("a handle of the same process is its pointer, and only what was exported is") {
    if (!have_device("a handle of the same process")) {
        return;
    }
    forked process{ipc_pair::told(open_own)};
    const auto result = process.to().take<same_process>();
    CHECK(result.is_pointer);
    CHECK(result.is_pointer_without_start_time);
    CHECK(result.opened == 0);
    CHECK(result.unknown.error() == "protocol");
    CHECK(result.own.error() == "protocol");
    CHECK(result.elsewhere.error() == "protocol");
    CHECK(result.beyond.error() == "protocol");
    CHECK(result.short_handle.error() == "protocol");
    CHECK(result.stranger.error() == "protocol");
    CHECK(result.freed.error() == "peer");
    CHECK(result.usable);
    print("bytes that are no handle:", result.stranger);
    print("this process's handle, not of this library:", result.own);
    print("this process's, freed since:", result.freed);
}

namespace {

/// Virtual memory as PyTorch's expandable segments use it.
class virtual_memory {
public:
    explicit virtual_memory(std::size_t bytes) : bytes_{bytes} {
        using gpu::detail::check_driver;
        using gpu::detail::driver_function;
        CUmemAllocationProp wanted{};
        wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        wanted.location.id = 0;
        check_driver(driver_function<decltype(cuMemAddressReserve)>("cuMemAddressReserve", 12000)(
                         &address_, bytes_, 0, 0, 0),
                     "cuMemAddressReserve");
        check_driver(driver_function<decltype(cuMemCreate)>("cuMemCreate", 12000)(&handle_, bytes_,
                                                                                  &wanted, 0),
                     "cuMemCreate");
        check_driver(
            driver_function<decltype(cuMemMap)>("cuMemMap", 12000)(address_, bytes_, 0, handle_, 0),
            "cuMemMap");
        CUmemAccessDesc access{};
        access.location = wanted.location;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        check_driver(driver_function<decltype(cuMemSetAccess)>("cuMemSetAccess", 12000)(
                         address_, bytes_, &access, 1),
                     "cuMemSetAccess");
    }
    [[nodiscard]] const std::byte* data() const {
        return reinterpret_cast<const std::byte*>(address_);
    }

private:
    std::size_t bytes_;  // all of it goes with the process
    CUdeviceptr address_ = 0;
    CUmemGenericAllocationHandle handle_ = 0;
};

std::string refusal(cuda_machinery& machine, const void* address, std::size_t bytes) {
    auto made = machine.export_of(static_cast<const std::byte*>(address), bytes);
    const auto* const why = std::get_if<std::string>(&made);
    return why != nullptr ? *why : "EXPORTED";
}

void refuse_exports(channel& parent) {
    cuda_machinery machine{0};
    const auto stream = machine.make_stream();
    std::string text;
    const auto add = [&](const char* name, const std::string& why) {
        text += std::string{name} + ": " + why + "\n";
    };
    void* memory = nullptr;
    gpu::check(cudaMallocAsync(&memory, mebibyte, stream.native_handle()), "cudaMallocAsync");
    stream.synchronize();
    add("pool", refusal(machine, memory, mebibyte));
    const virtual_memory mapped{8 * mebibyte};
    add("virtual", refusal(machine, mapped.data(), mebibyte));
    gpu::check(cudaMallocManaged(&memory, 4096, cudaMemAttachGlobal), "cudaMallocManaged");
    add("managed", refusal(machine, memory, 4096));
    const auto pinned = machine.allocate_pinned(4096);
    add("pinned", refusal(machine, pinned.data(), 4096));
    const std::vector<std::byte> pageable(4096);
    add("pageable", refusal(machine, pageable.data(), 4096));
    add("nothing", refusal(machine, nullptr, 1));
    const auto plain = machine.allocate_exportable(2 * mebibyte);
    add("beyond", refusal(machine, plain.data() + mebibyte, mebibyte + 1));
    add("plain", refusal(machine, plain.data() + mebibyte, mebibyte));
    add("device", ipc_pair::is_device_usable() ? "usable" : "not usable");
    parent.put_text(text);
}

}  // namespace

TEST_CASE("memory that no process can open is refused with words before it is exported") {
    if (!have_device("memory that no process can open")) {
        return;
    }
    forked process{ipc_pair::told(refuse_exports)};
    const std::string text = process.to().rest();
    std::printf("%s", text.c_str());
    const auto says = [&](const std::string& name, const std::string& words) {
        const auto line = text.find(name + ": ");
        const auto at = text.find(words, line);
        return line != std::string::npos && at < text.find('\n', line);
    };
    CHECK(says("pool", "cudaMallocAsync"));
    CHECK(says("virtual", "expandable_segments"));
    CHECK(says("managed", "cudaMallocManaged"));
    CHECK(says("pinned", "pinned host memory"));
    CHECK(says("pageable", "not memory of a device"));
    CHECK(says("nothing", "not memory of a device"));
    CHECK(says("beyond", "reaches beyond its allocation"));
    CHECK(says("plain", "EXPORTED"));
    CHECK(says("device", "usable"));
    CHECK(!says("device", "not usable"));
}

namespace {

constexpr std::uint64_t large_bytes = 4096 * mebibyte;

void export_filled(channel& parent, std::uint64_t bytes, std::uint64_t seed) {
    cuda_machinery machine{0};
    const ipc_pair::filler fill;
    const auto memory = machine.allocate_exportable(bytes);
    const auto stream = machine.make_stream();
    fill.fill(memory.data(), bytes, seed, stream);
    stream.synchronize();
    parent.put(ipc_pair::exported(machine, memory.data(), bytes));
    parent.put(ipc_pair::digest_of(machine, memory.data(), bytes));
    static_cast<void>(parent.take<char>());  // until it is killed, or told to end
}

struct killed_exporter {
    bool outlived = false;  ///< the copies ran on when the exporter was gone altogether
    bool right = false;
    bool right_again = false;
    std::uint64_t left_open = 1;
    bool usable = false;
    double close_ms = 0;
    opening later{};
};

void copy_from_killed(channel& parent) {
    const auto sent = parent.take<sent_export>();
    const auto wanted = parent.take<std::uint64_t>();
    killed_exporter result;
    cuda_machinery machine{0};
    const auto here = machine.allocate_exportable(large_bytes);
    const auto stream = machine.make_stream();
    auto done = machine.make_event();
    {
        auto mapped = machine.open(sent.from(), sent.what());
        const std::vector<std::vector<byte_move>> groups{
            {{here.data(), mapped.data(), large_bytes}}};
        const auto plan = machine.make_copies(groups);
        gpu::clear_bytes(here.data(), large_bytes, stream);
        stream.synchronize();
        for (int i = 0; i < 800; ++i) {  // about two seconds
            if (i == 20) {
                parent.put('r');
            }
            plan.launch(0, stream);
        }
        machine.record(done, stream);
        static_cast<void>(parent.take<char>());  // the exporter has got its signal
        parent.put(!machine.is_done(done));
        static_cast<void>(parent.take<char>());  // the exporter has ended
        result.outlived = !machine.is_done(done);
        ipc_pair::wait_for(machine, done);
        result.right = ipc_pair::digest_of(machine, here.data(), large_bytes) == wanted;
        gpu::clear_bytes(here.data(), large_bytes, stream);
        plan.launch(0, stream);
        machine.record(done, stream);
        ipc_pair::wait_for(machine, done);
        result.right_again = ipc_pair::digest_of(machine, here.data(), large_bytes) == wanted;
        const auto began = std::chrono::steady_clock::now();
        mapped = {};
        result.close_ms =
            std::chrono::duration<double, std::milli>{std::chrono::steady_clock::now() - began}
                .count();
    }
    result.left_open = gpu::detail::open_imports(0).size();
    result.usable = ipc_pair::is_device_usable();
    result.later = tried(machine, sent.from(), sent.what());
    result.usable = result.usable && ipc_pair::is_device_usable();
    parent.put(result);
    static_cast<void>(parent.take<char>());
}

}  // namespace

TEST_CASE("an exporter that is killed costs its reader neither the kernel nor the bytes") {
    if (!have_device("an exporter that is killed")) {
        return;
    }
    forked exporter{ipc_pair::told([](channel& parent) { export_filled(parent, large_bytes, 5); })};
    forked importer{ipc_pair::told(copy_from_killed)};
    importer.to().put(exporter.to().take<sent_export>());
    importer.to().put(exporter.to().take<std::uint64_t>());
    REQUIRE(importer.to().take<char>() == 'r');
    const auto began = std::chrono::steady_clock::now();
    exporter.signal(SIGKILL);
    importer.to().put('s');
    CHECK(importer.to().take<bool>());  // it was killed while the copies ran
    exporter.kill();
    const auto ended = std::chrono::steady_clock::now();
    importer.to().put('k');
    const auto result = importer.to().take<killed_exporter>();
    CHECK(result.right);
    CHECK(result.right_again);
    CHECK(result.left_open == 0);
    CHECK(result.usable);
    CHECK(result.later.error() == "peer");
    std::printf("  the killed process had ended after %.0f ms; the copies %s\n",
                std::chrono::duration<double, std::milli>{ended - began}.count(),
                result.outlived ? "still ran" : "were done");
    std::printf("  closing what a dead process exported: %.2f ms\n", result.close_ms);
    print("opening what a dead process exported:", result.later);
}

namespace {

void open_and_hold(channel& parent) {
    const auto sent = parent.take<sent_export>();
    const auto wanted = parent.take<std::uint64_t>();
    cuda_machinery machine{0};
    bool right = false;
    {
        const auto mapped = machine.open(sent.from(), sent.what());
        const auto here = machine.allocate_exportable(sent.bytes);
        ipc_pair::copy_now(machine, {{here.data(), mapped.data(), sent.bytes}});
        right = ipc_pair::digest_of(machine, here.data(), sent.bytes) == wanted;
        parent.put(right);
        static_cast<void>(parent.take<char>());
    }
    parent.put(ipc_pair::is_device_usable());
    static_cast<void>(parent.take<char>());
}

void export_and_free(channel& parent) {
    export_filled(parent, 64 * mebibyte, 6);
    parent.put(ipc_pair::is_device_usable());  // after its memory was freed
    static_cast<void>(parent.take<char>());
}

}  // namespace

TEST_CASE("exporter and importer may end in either order") {
    if (!have_device("exporter and importer may end in either order")) {
        return;
    }
    for (const bool exporter_first : {true, false}) {
        CAPTURE(exporter_first);
        forked exporter{ipc_pair::told(export_and_free)};
        forked importer{ipc_pair::told(open_and_hold)};
        importer.to().put(exporter.to().take<sent_export>());
        importer.to().put(exporter.to().take<std::uint64_t>());
        CHECK(importer.to().take<bool>());
        forked& first = exporter_first ? exporter : importer;
        forked& second = exporter_first ? importer : exporter;
        first.to().put('e');
        CHECK(first.to().take<bool>());
        first.to().put('e');
        CHECK(first.to().rest().empty());  // it has ended
        second.to().put('e');
        CHECK(second.to().take<bool>());
        second.to().put('e');
        CHECK(second.to().rest().empty());
    }
}

namespace {

/// Ends with a mapping in a static object that the runtime does not outlive.
void end_with_mapping(channel& parent) {
    static cuda_machinery::mapping held;  // before the first call of CUDA: destroyed after it
    const auto sent = parent.take<sent_export>();
    static_cast<void>(parent.take<std::uint64_t>());
    {
        cuda_machinery machine{0};
        held = machine.open(sent.from(), sent.what());
        parent.put(held.data() != nullptr);
    }
    std::exit(0);
}

}  // namespace

TEST_CASE("a mapping that outlives the runtime of CUDA ends harmlessly") {
    if (!have_device("a mapping that outlives the runtime")) {
        return;
    }
    std::fflush(nullptr);  // what is not yet written would be written twice
    forked exporter{
        ipc_pair::told([](channel& parent) { export_filled(parent, 64 * mebibyte, 10); })};
    forked importer{ipc_pair::told(end_with_mapping)};
    importer.to().put(exporter.to().take<sent_export>());
    importer.to().put(exporter.to().take<std::uint64_t>());
    CHECK(importer.to().take<bool>());
    CHECK(importer.to().rest().empty());
    int status = -1;
    REQUIRE(::waitpid(importer.process(), &status, 0) == importer.process());
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}

namespace {

constexpr std::uint64_t replaced_bytes = 64 * mebibyte;

/// Exports, frees and allocates anew, each when it is told. CUDA promises nothing about memory that
/// is freed while others have it open; that is why it is tried.
void export_twice(channel& parent) {
    cuda_machinery machine{0};
    const ipc_pair::filler fill;
    const auto stream = machine.make_stream();
    for (std::uint64_t seed = 7; seed < 9; ++seed) {
        const auto memory = machine.allocate_exportable(replaced_bytes);
        fill.fill(memory.data(), replaced_bytes, seed, stream);
        stream.synchronize();
        parent.put(ipc_pair::exported(machine, memory.data(), replaced_bytes));
        parent.put(ipc_pair::digest_of(machine, memory.data(), replaced_bytes));
        static_cast<void>(parent.take<char>());
    }
}

struct replaced {
    bool first_right = false;
    opening while_held{};          ///< opening the second while the first is still open
    bool right_while_held = true;  ///< the second's bytes, where that opens
    bool second_right = false;     ///< after the first was closed
    bool usable = false;
};

bool has_bytes(cuda_machinery& machine, const std::byte* from, std::uint64_t wanted) {
    const auto here = machine.allocate_exportable(replaced_bytes);
    ipc_pair::copy_now(machine, {{here.data(), from, replaced_bytes}});
    return ipc_pair::digest_of(machine, here.data(), replaced_bytes) == wanted;
}

void import_twice(channel& parent) {
    replaced result;
    cuda_machinery machine{0};
    const auto first = parent.take<sent_export>();
    const auto first_digest = parent.take<std::uint64_t>();
    auto held = machine.open(first.from(), first.what());
    result.first_right = has_bytes(machine, held.data(), first_digest);
    parent.put('o');
    const auto second = parent.take<sent_export>();
    const auto second_digest = parent.take<std::uint64_t>();
    result.while_held = tried(machine, second.from(), second.what());
    if (result.while_held.error().empty()) {
        const auto mapped = machine.open(second.from(), second.what());
        result.right_while_held = has_bytes(machine, mapped.data(), second_digest);
    }
    held = {};
    {
        const auto mapped = machine.open(second.from(), second.what());
        result.second_right = has_bytes(machine, mapped.data(), second_digest);
    }
    result.usable = ipc_pair::is_device_usable();
    parent.put(result);
    static_cast<void>(parent.take<char>());
}

}  // namespace

TEST_CASE("memory that was freed and allocated anew is never taken for the former") {
    if (!have_device("memory that was freed and allocated anew")) {
        return;
    }
    forked exporter{ipc_pair::told(export_twice)};
    forked importer{ipc_pair::told(import_twice)};
    const auto first = exporter.to().take<sent_export>();
    importer.to().put(first);
    importer.to().put(exporter.to().take<std::uint64_t>());
    REQUIRE(importer.to().take<char>() == 'o');
    exporter.to().put('n');
    const auto second = exporter.to().take<sent_export>();
    importer.to().put(second);
    importer.to().put(exporter.to().take<std::uint64_t>());
    const auto result = importer.to().take<replaced>();
    CHECK(result.first_right);
    CHECK((result.while_held.error().empty() || result.while_held.error() == "peer"));
    CHECK(result.right_while_held);
    CHECK(result.second_right);
    CHECK(result.usable);
    CHECK(first.buffer_id != second.buffer_id);
    std::printf(
        "  freed and allocated anew: address %s, handle bytes %s, buffer id %llu and %llu\n",
        first.base == second.base ? "the same" : "another",
        first.handle == second.handle ? "the same" : "other",
        static_cast<unsigned long long>(first.buffer_id),
        static_cast<unsigned long long>(second.buffer_id));
    print("the new one while the former is open:", result.while_held);
}

namespace {

struct memory_use {
    std::uint64_t free_bytes = 0;      ///< of the device
    std::uint64_t resident_bytes = 0;  ///< of this process
};

memory_use measure() {
    memory_use now;
    std::size_t free_bytes = 0;
    std::size_t total = 0;
    gpu::check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    now.free_bytes = free_bytes;
    if (std::FILE* const file = std::fopen("/proc/self/statm", "r"); file != nullptr) {
        unsigned long long size = 0;
        unsigned long long resident = 0;
        if (std::fscanf(file, "%llu %llu", &size, &resident) == 2) {
            now.resident_bytes = resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
        }
        std::fclose(file);
    }
    return now;
}

struct opened_often {
    memory_use before{};
    memory_use after{};
    double open_us = 0;
    double close_us = 0;
};

void open_often(channel& parent) {
    const auto sent = parent.take<sent_export>();
    static_cast<void>(parent.take<std::uint64_t>());
    cuda_machinery machine{0};
    opened_often result;
    const auto open_and_close = [&](int times) {
        using clock = std::chrono::steady_clock;
        clock::duration opening{};
        clock::duration closing{};
        for (int i = 0; i < times; ++i) {
            const auto began = clock::now();
            auto mapped = machine.open(sent.from(), sent.what());
            const auto opened = clock::now();
            mapped = {};
            opening += opened - began;
            closing += clock::now() - opened;
        }
        using microseconds = std::chrono::duration<double, std::micro>;
        result.open_us = microseconds{opening}.count() / times;
        result.close_us = microseconds{closing}.count() / times;
    };
    open_and_close(50);
    result.before = measure();
    open_and_close(1000);
    result.after = measure();
    parent.put(result);
    static_cast<void>(parent.take<char>());
}

}  // namespace

TEST_CASE("a thousand openings leave nothing behind") {
    if (!have_device("a thousand openings")) {
        return;
    }
    forked exporter{
        ipc_pair::told([](channel& parent) { export_filled(parent, 64 * mebibyte, 9); })};
    forked importer{ipc_pair::told(open_often)};
    importer.to().put(exporter.to().take<sent_export>());
    importer.to().put(exporter.to().take<std::uint64_t>());
    const auto result = importer.to().take<opened_often>();
    CHECK(result.after.free_bytes + 16 * mebibyte > result.before.free_bytes);
    CHECK(result.after.resident_bytes < result.before.resident_bytes + 16 * mebibyte);
    std::printf(
        "  64 MiB: open %.0f us, close %.0f us; 1,000 of both: device memory %+lld bytes, "
        "resident %+lld bytes\n",
        result.open_us, result.close_us,
        static_cast<long long>(result.before.free_bytes - result.after.free_bytes),
        static_cast<long long>(result.after.resident_bytes - result.before.resident_bytes));
}

namespace {

struct sent_event {
    cudaIpcEventHandle_t handle{};
    sent_export memory{};
};

/// Puts long work into a stream, and an event behind it that other processes can wait for.
void record_for_others(channel& parent) {
    cuda_machinery machine{0};
    const ipc_pair::filler fill;
    const auto stream = machine.make_stream();
    const auto memory = machine.allocate_exportable(large_bytes);
    cudaEvent_t event = nullptr;
    gpu::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
               "cudaEventCreateWithFlags");
    sent_event out{.memory = ipc_pair::exported(machine, memory.data(), large_bytes)};
    gpu::check(cudaIpcGetEventHandle(&out.handle, event), "cudaIpcGetEventHandle");
    static_cast<void>(parent.take<char>());                // the importer is ready
    for (std::uint64_t seed = 100; seed <= 500; ++seed) {  // the last one counts
        fill.fill(memory.data(), large_bytes, seed, stream);
    }
    gpu::check(cudaEventRecord(event, stream.native_handle()), "cudaEventRecord");
    const bool is_running = !gpu::stream_ref{stream}.is_idle();
    parent.put(out);
    parent.put(is_running);
    stream.synchronize();
    parent.put(ipc_pair::digest_of(machine, memory.data(), large_bytes));
    static_cast<void>(parent.take<char>());
    static_cast<void>(cudaEventDestroy(event));
}

struct waited {
    std::uint64_t digest = 0;
    opening no_event{};
    bool usable = false;
};

void copy_behind_event(channel& parent) {
    cuda_machinery machine{0};
    machine.load_kernels();
    const auto here = machine.allocate_exportable(large_bytes);
    auto stream = machine.make_stream();
    waited result;
    parent.put('r');
    const auto sent = parent.take<sent_event>();
    const auto mapped = machine.open(sent.memory.from(), sent.memory.what());
    const std::vector<std::vector<byte_move>> groups{{{here.data(), mapped.data(), large_bytes}}};
    const auto plan = machine.make_copies(groups);
    const auto event = machine.open_foreign_event(std::as_bytes(std::span{&sent.handle, 1}));
    while (!event.is_done()) {
    }
    plan.launch(0, stream);
    auto done = machine.make_event();
    machine.record(done, stream);
    ipc_pair::wait_for(machine, done);
    result.digest = ipc_pair::digest_of(machine, here.data(), large_bytes);
    try {
        const std::array<std::byte, 64> zeros{};
        static_cast<void>(machine.open_foreign_event(zeros));
    } catch (const weightwire::error& failure) {
        put_words(result.no_event.kind, failure.kind());
        put_words(result.no_event.words, failure.what());
    }
    result.usable = ipc_pair::is_device_usable();
    parent.put(result);
    static_cast<void>(parent.take<char>());
}

}  // namespace

TEST_CASE("a stream waits for the event of another process") {
    if (!have_device("a stream waits for the event of another process")) {
        return;
    }
    forked exporter{ipc_pair::told(record_for_others)};
    forked importer{ipc_pair::told(copy_behind_event)};
    REQUIRE(importer.to().take<char>() == 'r');
    exporter.to().put('r');
    importer.to().put(exporter.to().take<sent_event>());
    CHECK(exporter.to().take<bool>());  // the work was still running when its event was sent
    const auto result = importer.to().take<waited>();
    CHECK(result.digest == exporter.to().take<std::uint64_t>());
    // CUDA 13 gives for them the code that it gives for an event that is gone.
    CHECK((result.no_event.error() == "peer" || result.no_event.error() == "protocol"));
    CHECK(result.usable);
    print("64 zero bytes as an event:", result.no_event);
}
