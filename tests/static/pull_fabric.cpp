// SPDX-License-Identifier: Apache-2.0
// `PullFabric` accepts its archetype and the fabrics that there are, and refuses each mutant of the
// archetype that has one defect.

#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include <weightwire/backends/sharded_pull/backend.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/shared_memory_fabric.hpp>

namespace {

using namespace weightwire;
using good = archetypes::pull_fabric;

struct no_name : good {
    static constexpr int name = 0;
};
struct no_capabilities : good {
    static constexpr bool capabilities = true;
};
struct owner_of_no_device : good {
    struct owner : good::owner {
        owner() : good::owner{0} {}
    };
};
struct no_address : good {
    struct owner : good::owner {
        using good::owner::owner;
        void address() const = delete;
    };
};
struct export_says_no_more : good {
    struct owner : good::owner {
        using good::owner::owner;
        fabric_export export_memory(const std::byte*, std::uint64_t) { return {}; }
    };
};
struct no_allocate : good {
    struct owner : good::owner {
        using good::owner::owner;
        void allocate(std::uint64_t) = delete;
    };
};
struct arena_not_exported : good {
    struct arena : good::arena {
        void exported() const = delete;
    };
    struct owner : good::owner {
        using good::owner::owner;
        arena allocate(std::uint64_t) { return {}; }
    };
};
struct connects_for_ever : good {
    struct reader : good::reader {
        using good::reader::reader;
        connection connect(std::string_view) { return {}; }
    };
};
struct opens_nothing : good {
    struct reader : good::reader {
        using good::reader::reader;
        void open(connection&, std::string_view, std::uint64_t, deadline,
                  const std::stop_token&) = delete;
    };
};
struct prepares_nothing : good {
    struct reader : good::reader {
        using good::reader::reader;
        void prepare(std::span<const remote_run<memory>>) = delete;
    };
};
struct starts_without_shift : good {
    struct reader : good::reader {
        using good::reader::reader;
        void start(read&) {}
    };
};
struct never_done : good {
    struct reader : good::reader {
        using good::reader::reader;
        void done(read&) {}
    };
};
struct waits_for_ever : good {
    struct reader : good::reader {
        using good::reader::reader;
        void wait(read&) {}
    };
};
struct cancel_may_throw : good {
    struct reader : good::reader {
        using good::reader::reader;
        void cancel(read&) {}
    };
};

static_assert(PullFabric<good> && explain_pull_fabric<good>());
static_assert(PullFabric<shm::fabric>);
static_assert(!HasFabricIdentity<no_name> && !PullFabric<no_name>);
static_assert(!HasFabricIdentity<no_capabilities> && !PullFabric<no_capabilities>);
static_assert(!HasFabricOwner<owner_of_no_device> && !PullFabric<owner_of_no_device>);
static_assert(!HasFabricOwner<no_address> && !PullFabric<no_address>);
static_assert(!HasFabricOwner<export_says_no_more> && !PullFabric<export_says_no_more>);
static_assert(!HasFabricOwner<no_allocate> && !PullFabric<no_allocate>);
static_assert(!HasFabricOwner<arena_not_exported> && !PullFabric<arena_not_exported>);
static_assert(!HasFabricReader<connects_for_ever> && !PullFabric<connects_for_ever>);
static_assert(!HasFabricReader<opens_nothing> && !PullFabric<opens_nothing>);
static_assert(!HasFabricReads<prepares_nothing> && !PullFabric<prepares_nothing>);
static_assert(!HasFabricReads<starts_without_shift> && !PullFabric<starts_without_shift>);
static_assert(!HasFabricReads<never_done> && !PullFabric<never_done>);
static_assert(!HasFabricReads<waits_for_ever> && !PullFabric<waits_for_ever>);
static_assert(!HasFabricReads<cancel_may_throw> && !PullFabric<cancel_may_throw>);
static_assert(!PullFabric<int>);

struct serving_owner : good::owner {
    using good::owner::owner;
    void serve(bool) noexcept {}
    void await_ready(void*, deadline, const std::stop_token&) {}
};
struct throwing_service : good::owner {
    using good::owner::owner;
    void serve(bool) {}
};
static_assert(HasFabricService<serving_owner> && HasFabricReadiness<serving_owner>);
static_assert(!HasFabricService<good::owner> && !HasFabricReadiness<good::owner>);
static_assert(!HasFabricService<throwing_service>);

struct resting_reader : good::reader {
    using good::reader::reader;
    void come_to_rest() noexcept {}
};
struct rest_may_throw : good::reader {
    using good::reader::reader;
    void come_to_rest() {}
};
static_assert(HasFabricRest<resting_reader>);
static_assert(!HasFabricRest<good::reader> && !HasFabricRest<rest_may_throw>);

/// A fabric with one within a node, each of the kinds of memory that are said.
template <bool Host, bool Device, bool NodeHost, bool NodeDevice, bool Across = true,
          bool InPlace = false>
struct crossing : good {
    static constexpr fabric_capabilities capabilities{.host_memory = Host,
                                                      .device_memory = Device,
                                                      .across_machines = Across,
                                                      .in_place = InPlace};
    struct within_node : good {
        static constexpr fabric_capabilities capabilities{.host_memory = NodeHost,
                                                          .device_memory = NodeDevice};
    };
};
static_assert(HasWithinNode<crossing<true, false, true, false>>);
static_assert(HasWithinNode<crossing<false, true, false, true>>);
static_assert(HasWithinNode<crossing<true, true, true, true>>);
static_assert(!HasWithinNode<good>);
static_assert(!HasWithinNode<crossing<false, true, true, false>>);  // it fills no device memory
static_assert(!HasWithinNode<crossing<true, true, false, true>>);   // nor this host memory
static_assert(!HasWithinNode<crossing<true, false, true, false, false>>);       // within machines
static_assert(!HasWithinNode<crossing<true, false, true, false, true, true>>);  // nothing packed

static_assert(HasReopen<sharded_pull::basic_receiver<shm::fabric>>);
static_assert(!HasReopen<good::reader>);

static_assert(std::is_nothrow_move_constructible_v<shm::fabric::arena> &&
              !std::is_copy_constructible_v<shm::fabric::arena>);
static_assert(!std::is_copy_constructible_v<shm::fabric::memory>);

}  // namespace
