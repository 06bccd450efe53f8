// SPDX-License-Identifier: Apache-2.0
// Every concept accepts its archetype, and refuses each mutant of it that has one defect.

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/http_client.hpp>
#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/concepts/trainer_init_info.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/concepts/weight_source.hpp>

namespace {

using namespace weightwire;

// A mutant derives from the archetype and hides one member: by a deleted one where it should be
// missing, by one of another form where the form is wrong.

namespace source_mutants {

struct no_metadata : archetypes::weight_source {
    void metadata() const = delete;
};
struct metadata_is_one : archetypes::weight_source {
    param_meta metadata() const { return {}; }
};
struct metadata_of_names : archetypes::weight_source {
    std::vector<std::string> metadata() const { return {}; }
};
struct no_weights : archetypes::weight_source {
    void weights() = delete;
};
struct weights_are_views : archetypes::weight_source {
    std::vector<tensor_view> weights() { return {}; }
};
struct weights_once : archetypes::weight_source {
    std::vector<named_tensor> weights() && { return {}; }
};

static_assert(WeightSource<archetypes::weight_source>);
static_assert(WeightSource<archetypes::weight_source&>);
static_assert(!WeightSource<no_metadata>);
static_assert(!WeightSource<metadata_is_one>);
static_assert(!WeightSource<metadata_of_names>);
static_assert(!WeightSource<no_weights>);
static_assert(!WeightSource<weights_are_views>);
static_assert(!WeightSource<weights_once>);
static_assert(!WeightSource<int>);
static_assert(!WeightSource<std::vector<named_tensor>>);

// What is optional is detected, and absent from the archetype.
struct everything : archetypes::weight_source {
    static constexpr tensor_lifetime lifetime = tensor_lifetime::stable;
    using archetypes::weight_source::weights;
    std::list<named_tensor> weights(std::size_t) { return {}; }
    std::vector<std::string> held_names() const { return {}; }
    std::vector<std::size_t> groups() const { return {}; }
    void read(const named_tensor&, std::uint64_t, std::span<std::byte>) const {}
};
static_assert(WeightSource<everything> && HasHeldNames<everything> && HasGroups<everything> &&
              HasGroupWeights<everything> && HasRead<everything> && HasLifetime<everything>);
static_assert(!HasHeldNames<archetypes::weight_source> && !HasGroups<archetypes::weight_source> &&
              !HasGroupWeights<archetypes::weight_source> && !HasRead<archetypes::weight_source> &&
              !HasLifetime<archetypes::weight_source>);
static_assert(lifetime_of<everything>() == tensor_lifetime::stable);
static_assert(lifetime_of<const everything&>() == tensor_lifetime::stable);
static_assert(lifetime_of<archetypes::weight_source>() == tensor_lifetime::until_next);

}  // namespace source_mutants

}  // namespace

// A trait wins over a member: it is the user's word on a type that is not theirs.
namespace {
struct foreign_source : archetypes::weight_source {
    static constexpr tensor_lifetime lifetime = tensor_lifetime::stable;
};
}  // namespace
template <>
struct weightwire::source_traits<foreign_source> {
    static constexpr tensor_lifetime lifetime = tensor_lifetime::until_group_end;
};

namespace {

static_assert(foreign_source::lifetime == tensor_lifetime::stable &&
              lifetime_of<foreign_source>() == tensor_lifetime::until_group_end);

namespace client_mutants {

using replies = std::vector<peer_reply>;

struct no_peer_count : archetypes::sync_client {
    void peer_count() const = delete;
};
struct no_peer_name : archetypes::sync_client {
    void peer_name(std::size_t) const = delete;
};
struct no_init : archetypes::sync_client {
    void init() = delete;
};
struct no_start : archetypes::sync_client {
    void start() = delete;
};
struct no_update : archetypes::sync_client {
    void update() = delete;
};
struct no_finish : archetypes::sync_client {
    void finish() = delete;
};
struct init_says_nothing : archetypes::sync_client {
    void init(const control_message&, deadline, std::stop_token) {}
};
struct start_for_ever : archetypes::sync_client {
    replies start(const control_message&) { return {}; }
};
struct update_cannot_be_stopped : archetypes::sync_client {
    replies update(const control_message&, deadline) { return {}; }
};
struct finish_of_one : archetypes::sync_client {
    peer_reply finish(const control_message&, deadline, std::stop_token) { return {}; }
};

static_assert(SyncClient<archetypes::sync_client>);
static_assert(SyncClient<archetypes::sync_client&>);
static_assert(!SyncClient<no_peer_count>);
static_assert(!SyncClient<no_peer_name>);
static_assert(!SyncClient<no_init>);
static_assert(!SyncClient<no_start>);
static_assert(!SyncClient<no_update>);
static_assert(!SyncClient<no_finish>);
static_assert(!SyncClient<init_says_nothing>);
static_assert(!SyncClient<start_for_ever>);
static_assert(!SyncClient<update_cannot_be_stopped>);
static_assert(!SyncClient<finish_of_one>);
static_assert(!HasRequest<archetypes::sync_client>);

struct with_request : archetypes::sync_client {
    replies request(std::string_view, std::string_view, const control_message&, deadline,
                    std::stop_token) {
        return {};
    }
};
static_assert(SyncClient<with_request> && HasRequest<with_request>);

}  // namespace client_mutants

namespace info_mutants {

struct no_tag {
    int rank = 0;
    std::string init_message() const { return {}; }
};
struct no_rank {
    using backend = archetypes::backend;
    std::string init_message() const { return {}; }
};
struct rank_is_text {
    using backend = archetypes::backend;
    std::string rank{};
    std::string init_message() const { return {}; }
};
struct no_message : archetypes::trainer_init_info {
    void init_message() const = delete;
};
struct message_changes_it : archetypes::trainer_init_info {
    std::string init_message() { return {}; }
};
struct not_copyable : archetypes::trainer_init_info {
    std::unique_ptr<int> owned{};
};

static_assert(TrainerInitInfo<archetypes::trainer_init_info>);
static_assert(TrainerInitInfo<const archetypes::trainer_init_info&>);
static_assert(!TrainerInitInfo<no_tag>);
static_assert(!TrainerInitInfo<no_rank>);
static_assert(!TrainerInitInfo<rank_is_text>);
static_assert(!TrainerInitInfo<no_message>);
static_assert(!TrainerInitInfo<message_changes_it>);
static_assert(!TrainerInitInfo<not_copyable>);

}  // namespace info_mutants

namespace group_mutants {

struct no_rank : archetypes::trainer_group {
    void rank() const = delete;
};
struct no_size : archetypes::trainer_group {
    void size() const = delete;
};
struct no_all_gather : archetypes::trainer_group {
    void all_gather() = delete;
};
struct all_gather_for_ever : archetypes::trainer_group {
    std::vector<std::string> all_gather(std::string_view) { return {}; }
};
struct gathers_one : archetypes::trainer_group {
    std::string all_gather(std::string_view, deadline) { return {}; }
};
struct no_barrier : archetypes::trainer_group {
    void barrier() = delete;
};

static_assert(TrainerGroup<archetypes::trainer_group>);
static_assert(TrainerGroup<single_rank>);
static_assert(!TrainerGroup<no_rank>);
static_assert(!TrainerGroup<no_size>);
static_assert(!TrainerGroup<no_all_gather>);
static_assert(!TrainerGroup<all_gather_for_ever>);
static_assert(!TrainerGroup<gathers_one>);
static_assert(!TrainerGroup<no_barrier>);

}  // namespace group_mutants

namespace sink_mutants {

struct no_begin : archetypes::weight_sink {
    void begin() = delete;
};
struct begin_of_views : archetypes::weight_sink {
    std::span<const mutable_tensor_view> begin(const session_info&, const manifest&, deadline) {
        return {};
    }
};
struct no_group_complete : archetypes::weight_sink {
    void group_complete() = delete;
};
struct no_prepare : archetypes::weight_sink {
    void prepare() = delete;
};
struct no_commit : archetypes::weight_sink {
    void commit() = delete;
};
struct commit_may_throw : archetypes::weight_sink {
    void commit(weight_version) {}
};
struct no_rollback : archetypes::weight_sink {
    void rollback() noexcept = delete;
};
struct rollback_may_throw : archetypes::weight_sink {
    void rollback() {}
};
struct no_version : archetypes::weight_sink {
    void version() const = delete;
};
struct no_dirty : archetypes::weight_sink {
    void dirty() const = delete;
};

static_assert(WeightSink<archetypes::weight_sink>);
static_assert(WeightSink<archetypes::weight_sink&>);
static_assert(!WeightSink<no_begin>);
static_assert(!WeightSink<begin_of_views>);
static_assert(!WeightSink<no_group_complete>);
static_assert(!WeightSink<no_prepare>);
static_assert(!WeightSink<no_commit>);
static_assert(!WeightSink<commit_may_throw>);
static_assert(!WeightSink<no_rollback>);
static_assert(!WeightSink<rollback_may_throw>);
static_assert(!WeightSink<no_version>);
static_assert(!WeightSink<no_dirty>);
static_assert(!HasSnapshots<archetypes::weight_sink> && !HasCommitMode<archetypes::weight_sink> &&
              !HasBouncedDestinations<archetypes::weight_sink>);
static_assert(!HasStoppableBegin<archetypes::weight_sink> &&
              !HasStoppablePrepare<archetypes::weight_sink> &&
              !HasCommitEstimate<archetypes::weight_sink> && !HasExchange<archetypes::weight_sink>);

// What a sink on a device adds, and each of it almost.
struct on_a_device : archetypes::weight_sink {
    weightwire::device device() const { return {memory_kind::cuda, 1}; }
    void tensor_digests(std::span<const tensor_view>, std::span<std::uint64_t>, deadline,
                        const std::stop_token&) {}
    void clear_tensor(const mutable_tensor_view&) {}
};
struct device_as_number : archetypes::weight_sink {
    int device() const { return 1; }
};
struct digests_for_ever : archetypes::weight_sink {
    void tensor_digests(std::span<const tensor_view>, std::span<std::uint64_t>) {}
};
struct clears_nothing : archetypes::weight_sink {
    void clear_tensor() {}
};
static_assert(WeightSink<on_a_device> && HasDevice<on_a_device> && HasDevice<on_a_device&> &&
              HasTensorDigests<on_a_device> && HasTensorClear<on_a_device>);
static_assert(!HasDevice<archetypes::weight_sink> && !HasTensorDigests<archetypes::weight_sink> &&
              !HasTensorClear<archetypes::weight_sink>);
static_assert(!HasDevice<device_as_number>);
static_assert(!HasTensorDigests<digests_for_ever>);
static_assert(!HasTensorClear<clears_nothing>);

}  // namespace sink_mutants

namespace event_mutants {

struct no_on {};
struct may_throw {
    void on(const event&) {}
};
struct wants_to_change_it {
    void on(event&) noexcept {}
};

static_assert(EventSink<archetypes::event_sink>);
static_assert(EventSink<archetypes::event_sink&>);
static_assert(!EventSink<no_on>);
static_assert(!EventSink<may_throw>);
static_assert(!EventSink<wants_to_change_it>);
static_assert(EventSink<no_events> && std::is_empty_v<no_events>);

}  // namespace event_mutants

namespace http_mutants {

struct no_exchange : archetypes::http_client {
    void exchange() = delete;
};
struct exchange_for_ever : archetypes::http_client {
    http_answer exchange(const http_call&) { return {}; }
};
struct answers_text : archetypes::http_client {
    std::string exchange(const http_call&, deadline, std::stop_token) { return {}; }
};
struct no_url : archetypes::http_client {
    void url() const = delete;
};

static_assert(HttpClient<archetypes::http_client>);
static_assert(HttpClient<archetypes::http_client&>);
static_assert(!HttpClient<no_exchange>);
static_assert(!HttpClient<exchange_for_ever>);
static_assert(!HttpClient<answers_text>);
static_assert(!HttpClient<no_url>);

}  // namespace http_mutants

// A backend is two halves and a trait; a mutant of any of them is a tag of its own.
struct good_sender {
    explicit good_sender(const archetypes::trainer_init_info&) {}
    std::vector<transport_init> prepare(const sender_context&) { return {}; }
    void open(deadline, std::stop_token) {}
    std::span<const update_part> parts() const { return {}; }
    void send(std::uint64_t, std::size_t, tensor_stream&, deadline, std::stop_token) {}
    void close(deadline) {}
};
struct good_receiver {
    explicit good_receiver(const receiver_context&) {}
    void open(const transport_open&, deadline, std::stop_token) {}
    void receive(const update_message&, update_target&, deadline, std::stop_token) {}
    void release() noexcept {}
};

template <class Sender = good_sender, class Receiver = good_receiver>
struct tag {};

namespace transport_mutants {

struct no_construction : good_sender {
    no_construction() : good_sender{archetypes::trainer_init_info{}} {}
};
struct no_prepare : good_sender {
    using good_sender::good_sender;
    void prepare() = delete;
};
struct prepares_one : good_sender {
    using good_sender::good_sender;
    transport_init prepare(const sender_context&) { return {}; }
};
struct no_open : good_sender {
    using good_sender::good_sender;
    void open() = delete;
};
struct open_for_ever : good_sender {
    using good_sender::good_sender;
    void open(std::stop_token) {}
};
struct no_parts : good_sender {
    using good_sender::good_sender;
    void parts() const = delete;
};
struct no_send : good_sender {
    using good_sender::good_sender;
    void send() = delete;
};
struct no_close : good_sender {
    using good_sender::good_sender;
    void close() = delete;
};
struct no_context : good_receiver {
    no_context() : good_receiver{receiver_context{}} {}
};
struct receiver_without_open : good_receiver {
    using good_receiver::good_receiver;
    void open() = delete;
};
struct no_receive : good_receiver {
    using good_receiver::good_receiver;
    void receive() = delete;
};
struct no_release : good_receiver {
    using good_receiver::good_receiver;
    void release() noexcept = delete;
};
struct release_may_throw : good_receiver {
    using good_receiver::good_receiver;
    void release() {}
};

struct unspecialised {};
struct no_wire_name {};
struct no_capabilities {};
struct no_init_info {};
struct init_info_is_none {};
struct no_sender {};
struct no_receiver {};

}  // namespace transport_mutants

}  // namespace

template <class Sender, class Receiver>
struct weightwire::backend_traits<tag<Sender, Receiver>> {
    static constexpr std::string_view wire_name = "static";
    static constexpr transport_capabilities capabilities{.host_memory = true};
    using init_info = archetypes::trainer_init_info;
    using sender = Sender;
    using receiver = Receiver;
};
template <>
struct weightwire::backend_traits<transport_mutants::no_wire_name> {
    static constexpr transport_capabilities capabilities{};
    using init_info = archetypes::trainer_init_info;
    using sender = good_sender;
    using receiver = good_receiver;
};
template <>
struct weightwire::backend_traits<transport_mutants::no_capabilities> {
    static constexpr std::string_view wire_name = "static";
    using init_info = archetypes::trainer_init_info;
    using sender = good_sender;
    using receiver = good_receiver;
};
template <>
struct weightwire::backend_traits<transport_mutants::no_init_info> {
    static constexpr std::string_view wire_name = "static";
    static constexpr transport_capabilities capabilities{};
    using sender = good_sender;
    using receiver = good_receiver;
};
template <>
struct weightwire::backend_traits<transport_mutants::init_info_is_none> {
    static constexpr std::string_view wire_name = "static";
    static constexpr transport_capabilities capabilities{};
    using init_info = std::string;
    using sender = good_sender;
    using receiver = good_receiver;
};
template <>
struct weightwire::backend_traits<transport_mutants::no_sender> {
    static constexpr std::string_view wire_name = "static";
    static constexpr transport_capabilities capabilities{};
    using init_info = archetypes::trainer_init_info;
    using receiver = good_receiver;
};
template <>
struct weightwire::backend_traits<transport_mutants::no_receiver> {
    static constexpr std::string_view wire_name = "static";
    static constexpr transport_capabilities capabilities{};
    using init_info = archetypes::trainer_init_info;
    using sender = good_sender;
};

namespace {

static_assert(Transport<tag<>>);
static_assert(explain_transport<tag<>>());
static_assert(!Transport<tag<transport_mutants::no_construction>>);
static_assert(!Transport<tag<transport_mutants::no_prepare>>);
static_assert(!Transport<tag<transport_mutants::prepares_one>>);
static_assert(!Transport<tag<transport_mutants::no_open>>);
static_assert(!Transport<tag<transport_mutants::open_for_ever>>);
static_assert(!Transport<tag<transport_mutants::no_parts>>);
static_assert(!Transport<tag<transport_mutants::no_send>>);
static_assert(!Transport<tag<transport_mutants::no_close>>);
static_assert(!Transport<tag<good_sender, transport_mutants::no_context>>);
static_assert(!Transport<tag<good_sender, transport_mutants::receiver_without_open>>);
static_assert(!Transport<tag<good_sender, transport_mutants::no_receive>>);
static_assert(!Transport<tag<good_sender, transport_mutants::no_release>>);
static_assert(!Transport<tag<good_sender, transport_mutants::release_may_throw>>);
static_assert(!Transport<transport_mutants::unspecialised>);
static_assert(!Transport<transport_mutants::no_wire_name> &&
              HasCapabilities<transport_mutants::no_wire_name>);
static_assert(!Transport<transport_mutants::no_capabilities>);
static_assert(!Transport<transport_mutants::no_init_info>);
static_assert(!Transport<transport_mutants::init_info_is_none>);
static_assert(!Transport<transport_mutants::no_sender>);
static_assert(!Transport<transport_mutants::no_receiver>);
static_assert(!HasDropPeer<good_sender> && !HasDigests<good_sender> &&
              !HasDescription<good_sender>);

// What a sender may add, and each of it almost.
struct staging_sender : good_sender {
    using good_sender::good_sender;
    void stage(std::uint64_t, std::size_t, tensor_stream&, deadline, std::stop_token) {}
};
struct stages_for_ever : good_sender {
    using good_sender::good_sender;
    void stage(std::uint64_t, std::size_t, tensor_stream&) {}
};
struct stages_without_tensors : good_sender {
    using good_sender::good_sender;
    void stage(std::uint64_t, std::size_t, deadline, std::stop_token) {}
};
struct exporting_sender : staging_sender {
    using staging_sender::staging_sender;
    std::string export_memory(const sender_context&) { return {}; }
    std::string shared_plan() const { return {}; }
    void adopt_plan(std::string_view) {}
};
struct exports_nothing : exporting_sender {
    using exporting_sender::exporting_sender;
    void export_memory(const sender_context&) {}
};
struct no_shared_plan : exporting_sender {
    using exporting_sender::exporting_sender;
    void shared_plan() const = delete;
};
struct plans_anew : exporting_sender {
    using exporting_sender::exporting_sender;
    std::string shared_plan() { return {}; }
};
struct no_adopt_plan : exporting_sender {
    using exporting_sender::exporting_sender;
    void adopt_plan() = delete;
};
struct exports_without_staging : exporting_sender {
    using exporting_sender::exporting_sender;
    void stage() = delete;
};
static_assert(Transport<tag<staging_sender>> && HasStage<staging_sender> &&
              !HasRankExports<staging_sender>);
static_assert(Transport<tag<exporting_sender>> && HasStage<exporting_sender> &&
              HasRankExports<exporting_sender>);
static_assert(!HasStage<good_sender> && !HasExportMemory<good_sender> &&
              !HasSharedPlan<good_sender> && !HasRankExports<good_sender>);
static_assert(!HasStage<stages_for_ever>);
static_assert(!HasStage<stages_without_tensors>);
static_assert(!HasExportMemory<exports_nothing> && !HasRankExports<exports_nothing>);
static_assert(!HasSharedPlan<no_shared_plan> && !HasRankExports<no_shared_plan>);
static_assert(!HasSharedPlan<plans_anew> && !HasRankExports<plans_anew>);
static_assert(!HasSharedPlan<no_adopt_plan> && !HasRankExports<no_adopt_plan>);
static_assert(!HasStage<exports_without_staging> && HasSharedPlan<exports_without_staging> &&
              !HasRankExports<exports_without_staging>);

}  // namespace
