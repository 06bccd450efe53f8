#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <weightwire/concepts/tensor_stream.hpp>
#include <weightwire/concepts/trainer_init_info.hpp>
#include <weightwire/concepts/update_target.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/manifest.hpp>

/// @file
/// `Transport`: how bytes travel. A backend is a tag and a specialisation of `backend_traits<Tag>`;
/// the concept checks that specialisation. There is no registry.
///
/// A round, on the trainer: for every part, the control call that announces it and `sender.send`
/// run side by side, and whichever fails first stops the other; `sender.stage`, where there is one,
/// comes before both. On the worker: `receiver.receive` runs inside that control call and returns
/// when the part's bytes are in place.
///
/// Semantics:
/// - Every member that takes a deadline gives up at it with `timeout_error`, and at the stop with
/// `cancelled_error`.
///   No call joins a peer without them. Destructors abort and never wait.
/// - `prepare` may bind, allocate and export; it does not wait for a peer. `open` may; it runs
/// beside the init call.
/// - `parts()` is fixed by `open`. `send` reads exactly the part's tensors from the stream, in
/// order.
/// - A receiver writes only to what its target opened and reports each write. It validates
/// everything that came from
///   the peer before using it as a size, index or address.
/// - After `receive` threw, the receiver may be released; it is not used again before the next
/// `open`.

namespace weightwire {

/// Customisation point: specialise for your backend's tag. The primary is empty. A specialisation
/// has `static constexpr std::string_view wire_name`, `static constexpr transport_capabilities
/// capabilities`, and the types `init_info`, `sender` and `receiver`.
template <class Tag>
struct backend_traits {};

/// What a transport can do; the engines choose by it.
struct transport_capabilities {
    bool host_memory = false;    ///< reads and writes host memory
    bool device_memory = false;  ///< reads and writes device memory
    bool converts = false;       ///< writes destinations of another dtype than the parameter's
    bool one_sided = false;      ///< the worker reads without the trainer's help
    bool drops_peers =
        false;  ///< `sender.drop_peer(i)`: one peer's failure need not stop the others
    bool speaks_vllm = false;  ///< can be spoken to a vLLM server; else only to our own worker
    /// `receiver.open` neither waits for its trainer nor takes memory worth the name, and changes
    /// nothing that another receiver of the same rank can see: the worker then opens a new
    /// trainer's receivers before it lets go of the old one's, who loses nothing if that fails.
    bool opens_beside = false;
    /// Made for weights in shards. A trainer rank may hold only some of the parameters
    /// (`HasHeldNames`), and each runs `send` beside the call. A session's parameters are the
    /// sink's own, of each rank for itself, whatever the trainer's are: the receiver has planned
    /// which bytes go where.
    bool sharded = false;
    /// What giving up takes once a wait in `open`, `send` or `receive` has ended: an abort of a
    /// broadcast. The engines end those waits this much before the call that carries them, so that
    /// the reason is still heard. At most a quarter of the time is kept for it.
    std::chrono::milliseconds let_go{0};

    /// When a wait gives up that stands in a call which ends at `call_ends`.
    [[nodiscard]] deadline before_let_go(deadline call_ends) const noexcept {
        return deadline::at(call_ends.when() -
                            std::min<deadline::clock::duration>(let_go, call_ends.remaining() / 4));
    }
};

/// One server that the trainer sends to.
struct peer_info {
    std::string name;     ///< URL
    int world_size = 1;   ///< worker ranks behind it
    int rank_offset = 1;  ///< global rank of its first worker; the trainer's sender is rank 0
    bool native = false;  ///< understands the native wire
    /// Whether it has the start and finish calls. False: vLLM 0.16 to 0.20, where each update call
    /// is a session of its own, so a round must be one part.
    bool session_routes = true;
    std::string version{};  ///< of the server, as `GET /version` says; empty: it does not
};

/// What a sender learns before it prepares. Views live as long as the sender.
struct sender_context {
    const weightwire::manifest& parameters;
    std::span<const peer_info> peers;
    int world_size = 1;  ///< 1 + the sum of the peers'
    tensor_lifetime lifetime = tensor_lifetime::until_next;
    /// For a source whose addresses are stable: its tensors in manifest order. Else empty.
    std::span<const tensor_view> stable_tensors{};
    /// What `export_memory` gave on each trainer rank, for rank 0's `prepare` (`HasRankExports`).
    /// Empty where the trainer has one rank: then `send` may read ahead.
    std::span<const std::string> exports{};
    /// Of a `sharded` transport: one a parameter, not 0 where this rank holds it; empty: it holds
    /// all. `stable_tensors` has no data for the others.
    std::span<const unsigned char> held{};
    /// Of a `sharded` transport: sizes of the gather groups, in manifest order.
    std::span<const std::size_t> group_sizes{};
};

/// One way to tell a vLLM server of the transfer: its releases differ in the fields that they know.
struct vllm_form {
    std::string init_info{};      ///< JSON object
    std::size_t update_body = 0;  ///< index in `update_part::vllm_bodies` of the body that fits it
};

/// What one peer must be told at init.
struct transport_init {
    /// JSON object beside the wire parameters, travels inside the native init message: handles,
    /// addresses.
    std::string native{};
    /// Forms to try as vLLM's `init_info`, newest first: the next one when a server refuses a field
    /// that it does not know. Empty where vLLM is not spoken.
    std::vector<vllm_form> vllm{};
    /// Why a form for older servers is not among them, and what to do; told to who meets a server
    /// that refuses the last one. Empty: none is missing.
    std::string missing_form{};
};

/// One update call's share of a round: a run of manifest positions.
struct update_part {
    std::size_t first = 0;
    std::size_t count = 0;
    /// JSON bodies of the call towards vLLM, serialized once for all peers and rounds, for the
    /// forms of the init call to choose from; empty where vLLM is not spoken.
    std::vector<std::string> vllm_bodies{};
    /// Tensors of the round's stream that are read when the part is staged (`HasStage`), where
    /// these are more than those up to the part's last: a plan that takes a stable source's tensors
    /// in another order walks it whole with the first part. Looked at where every trainer rank
    /// serves.
    std::size_t read_until = 0;
};

/// What a receiver learns when it is made.
struct receiver_context {
    int local_rank = 0;   ///< rank behind this worker server
    int global_rank = 1;  ///< rank in the transfer group; the sender is 0
    int world_size = 2;   ///< size of the transfer group
    int device = 0;       ///< CUDA device of this rank
};

/// A JSON value of an update request that only the backend understands.
using wire_value = std::variant<std::monostate, bool, std::int64_t, double, std::string,
                                std::vector<std::int64_t>>;

/// What a peer said at init. Views live until `open` returns, the manifest until `release`.
struct transport_open {
    /// JSON object: `init_message()` of the trainer's init info, or a vLLM peer's whole
    /// `init_info`.
    std::string_view wire_parameters{};
    /// JSON object: `transport_init::native` for this peer; empty from a vLLM peer.
    std::string_view transport{};
    /// The trainer's parameters; null from a vLLM peer, which names them in each update.
    const manifest* parameters = nullptr;
    /// Of a `sharded` transport: what this rank's sink holds. Lives until `release`.
    const manifest* destinations = nullptr;
};

/// One update call as a receiver sees it.
struct update_message {
    /// Counts the trainer's rounds since init, from 1; 0 when the peer is vLLM's.
    std::uint64_t round = 0;
    std::size_t part = 0;   ///< index of the part in the round
    std::size_t first = 0;  ///< manifest position of the part's first parameter, native only
    std::size_t count = 0;  ///< parameters of the part, native only
    bool native = false;
    /// Fields of a vLLM-form request beside names, dtype names and shapes.
    std::span<const std::pair<std::string, wire_value>> extras{};
};

template <class Tag>
concept HasWireName = requires {
    { backend_traits<Tag>::wire_name } -> std::convertible_to<std::string_view>;
};
template <class Tag>
concept HasCapabilities = requires {
    { backend_traits<Tag>::capabilities } -> std::convertible_to<transport_capabilities>;
};
template <class Tag>
concept HasInitInfo = requires { typename backend_traits<Tag>::init_info; } &&
                      TrainerInitInfo<typename backend_traits<Tag>::init_info>;

/// `sender(init_info)`; cheap.
template <class Tag>
concept HasSender = HasInitInfo<Tag> && requires { typename backend_traits<Tag>::sender; } &&
                    std::constructible_from<typename backend_traits<Tag>::sender,
                                            const typename backend_traits<Tag>::init_info&>;
/// `prepare(context)`: one `transport_init` a peer.
template <class Tag>
concept HasSenderPrepare =
    requires(typename backend_traits<Tag>::sender& sender, const sender_context& context) {
        { sender.prepare(context) } -> std::same_as<std::vector<transport_init>>;
    };
/// `open(deadline, stop)`.
template <class Tag>
concept HasSenderOpen = requires(typename backend_traits<Tag>::sender& sender, deadline until,
                                 std::stop_token stop) { sender.open(until, stop); };
/// `parts()`: the update calls of a round.
template <class Tag>
concept HasSenderParts = requires(const typename backend_traits<Tag>::sender& sender) {
    { sender.parts() } -> std::convertible_to<std::span<const update_part>>;
};
/// `send(round, part, stream, deadline, stop)`: returns when the source's memory is no longer
/// needed.
template <class Tag>
concept HasSend = requires(typename backend_traits<Tag>::sender& sender, std::uint64_t round,
                           std::size_t part, tensor_stream& stream, deadline until,
                           std::stop_token stop) { sender.send(round, part, stream, until, stop); };
/// `close(deadline)`: releases everything; the destructor does the same without waiting.
template <class Tag>
concept HasSenderClose =
    requires(typename backend_traits<Tag>::sender& sender, deadline until) { sender.close(until); };

/// `receiver(context)`; cheap. Or `receiver(context, tag)` with the worker's tag, where its members
/// choose something.
template <class Tag>
concept HasReceiver = requires {
    typename backend_traits<Tag>::receiver;
} && std::constructible_from<typename backend_traits<Tag>::receiver, const receiver_context&>;
/// `open(init, deadline, stop)`: maps or joins what the peer's init message names.
template <class Tag>
concept HasReceiverOpen =
    requires(typename backend_traits<Tag>::receiver& receiver, const transport_open& init,
             deadline until, std::stop_token stop) { receiver.open(init, until, stop); };
/// `receive(message, target, deadline, stop)`: returns when all bytes are in place.
template <class Tag>
concept HasReceive =
    requires(typename backend_traits<Tag>::receiver& receiver, const update_message& message,
             update_target& target, deadline until,
             std::stop_token stop) { receiver.receive(message, target, until, stop); };
/// Optional: `prepare(message, target, deadline, stop)`, just before `receive` with the same ones:
/// takes what memory the call needs. Every rank of a worker has prepared before one receives, since
/// taking device memory may wait for what a sibling's device does, which may wait for this rank.
template <class Receiver>
concept HasReceivePrepare = requires(Receiver& receiver, const update_message& message,
                                     update_target& target, deadline until, std::stop_token stop) {
    receiver.prepare(message, target, until, stop);
};
/// Optional: `lost() noexcept`: memory of this rank's device may be written at any later time, as
/// work on it could not be ended. The worker then begins nothing more and says that it is dirty.
template <class Receiver>
concept HasLost = requires(const Receiver& receiver) {
    { receiver.lost() } noexcept -> std::same_as<bool>;
};
/// Optional: `table_bytes() noexcept`: memory that a receiver takes in its first rounds; when it
/// grows the worker tells `description()` anew.
template <class Receiver>
concept HasTableBytes = requires(const Receiver& receiver) {
    { receiver.table_bytes() } noexcept -> std::convertible_to<std::uint64_t>;
};

/// Optional: `Receiver::reopens` is true: after `release` it may be opened again, and keeps what
/// makes that better. A worker then keeps it between two inits that give it the same place in the
/// group; without it every init has a receiver of its own.
template <class Receiver>
concept HasReopen = requires { requires bool{Receiver::reopens}; };

/// `release() noexcept`: lets go of everything of the peer's.
template <class Tag>
concept HasReceiverRelease = requires(typename backend_traits<Tag>::receiver& receiver) {
    { receiver.release() } noexcept;
};

/// How bytes travel, checked on `backend_traits<Tag>`.
template <class Tag>
concept Transport =
    HasWireName<Tag> && HasCapabilities<Tag> && HasInitInfo<Tag> && HasSender<Tag> &&
    HasSenderPrepare<Tag> && HasSenderOpen<Tag> && HasSenderParts<Tag> && HasSend<Tag> &&
    HasSenderClose<Tag> && HasReceiver<Tag> && HasReceiverOpen<Tag> && HasReceive<Tag> &&
    HasReceiverRelease<Tag>;

/// Optional: `drop_peer(i) noexcept`, thread-safe: from now on the sender waits for no rank of that
/// peer; `restore_peer(i)` undoes it before a round.
template <class Sender>
concept HasDropPeer = requires(Sender& sender, std::size_t peer) {
    { sender.drop_peer(peer) } noexcept;
    sender.restore_peer(peer);
};

/// Optional: `digests()`: after a round's last part, the digest of each parameter in manifest
/// order, or empty when verification was not asked for. The worker compares them with its
/// destinations before it commits.
template <class Sender>
concept HasDigests = requires(const Sender& sender) {
    { sender.digests() } -> std::convertible_to<std::span<const std::uint64_t>>;
};

/// Optional: `stage(round, part, stream, deadline, stop)`: what must be done before the part's
/// control call is made, as the workers read without asking. It reads from the stream what is not
/// read yet of the part's tensors. `send` of the part then reads none of them; it may read the next
/// part's ahead, which `stage` of that part does not read again. A new round begins with part 0 and
/// a fresh stream, whatever was read ahead in one that failed.
///
/// It has the update's deadline and the round's stop. When it throws, the call is not made and the
/// round has failed.
template <class Sender>
concept HasStage = requires(Sender& sender, std::uint64_t round, std::size_t part,
                            tensor_stream& stream, deadline until, std::stop_token stop) {
    sender.stage(round, part, stream, until, stop);
};

/// `export_memory(context)`: text that says how the workers open this rank's memory.
template <class Sender>
concept HasExportMemory = requires(Sender& sender, const sender_context& context) {
    { sender.export_memory(context) } -> std::convertible_to<std::string>;
};
/// `shared_plan()` and `adopt_plan(text)`: what the ranks must have alike.
template <class Sender>
concept HasSharedPlan = requires(Sender& sender, const Sender& planned, std::string_view plan) {
    { planned.shared_plan() } -> std::convertible_to<std::string>;
    sender.adopt_plan(plan);
};
/// Optional: every rank of a trainer serves its own memory, as a worker may reach only that of its
/// own GPU. Without it, and on a trainer of one rank, rank 0 alone sends and none of the members
/// below is called. With several ranks, each has a sender:
/// - `export_memory` comes first, on every rank. Its context has no peers and a world size of 1.
/// - Rank 0's `prepare` finds all ranks' texts in `sender_context::exports`. When the transfer is
///   opened anew it comes again, with the same texts, to the same sender, which was not closed:
///   what was exported stays where it is.
/// - After it `shared_plan` is asked on rank 0, and `adopt_plan` given to the others: their
///   `parts()` are then the same. Also each time that rank 0 has prepared anew.
/// - In a round every rank stages a part from its own stream: all that is left of the part, as the
///   sources advance in step. When all have, rank 0 alone makes the call and sends, which reads
///   nothing ahead. No rank stages the next part before that has ended.
/// - `close` ends it on every rank; `open`, `send` and `digests` are rank 0's alone.
/// - Of a `sharded` transport, `send` runs on every rank while rank 0's call is under way, and
/// reads
///   what `stage` has left of the part: sources need not advance in step, but for what is
///   collective in them. Peers that do not take part in the round are dropped on every rank before
///   it.
template <class Sender>
concept HasRankExports = HasStage<Sender> && HasExportMemory<Sender> && HasSharedPlan<Sender>;

/// Optional: `description()`: one line that says what was chosen and why, known after `prepare`.
template <class Half>
concept HasDescription = requires(const Half& half) {
    { half.description() } -> std::convertible_to<std::string>;
};

/// One readable line for every member that the backend of `Tag` lacks; call it under your
/// specialisation.
template <class Tag>
consteval bool explain_transport() {
    static_assert(HasWireName<Tag>,
                  "Transport: add static constexpr std::string_view wire_name to backend_traits");
    static_assert(
        HasCapabilities<Tag>,
        "Transport: add static constexpr transport_capabilities capabilities to backend_traits");
    static_assert(HasInitInfo<Tag>,
                  "Transport: add a member type init_info that models TrainerInitInfo");
    static_assert(HasSender<Tag>,
                  "Transport: add a member type sender, constructible from init_info");
    if constexpr (HasSender<Tag>) {
        static_assert(HasSenderPrepare<Tag>,
                      "Transport: the sender needs prepare(const sender_context&) returning "
                      "std::vector<transport_init>, one a peer");
        static_assert(HasSenderOpen<Tag>,
                      "Transport: the sender needs open(deadline, std::stop_token)");
        static_assert(HasSenderParts<Tag>,
                      "Transport: the sender needs parts() const returning a span of update_part");
        static_assert(HasSend<Tag>,
                      "Transport: the sender needs send(std::uint64_t round, std::size_t part, "
                      "tensor_stream&, deadline, std::stop_token)");
        static_assert(HasSenderClose<Tag>, "Transport: the sender needs close(deadline)");
        using sender = typename backend_traits<Tag>::sender;
        if constexpr (HasCapabilities<Tag>) {
            static_assert(
                HasRankExports<sender> || !backend_traits<Tag>::capabilities.sharded,
                "Transport: a sharded transport's sender serves on every trainer rank: it "
                "needs stage, export_memory, shared_plan and adopt_plan (HasRankExports)");
        }
        static_assert(HasRankExports<sender> || !HasExportMemory<sender>,
                      "Transport: a sender with export_memory needs stage(std::uint64_t round, "
                      "std::size_t part, tensor_stream&, deadline, std::stop_token), shared_plan() "
                      "const and adopt_plan(std::string_view) too");
    }
    static_assert(HasReceiver<Tag>,
                  "Transport: add a member type receiver, constructible from receiver_context");
    if constexpr (HasReceiver<Tag>) {
        static_assert(HasReceiverOpen<Tag>,
                      "Transport: the receiver needs open(const transport_open&, deadline, "
                      "std::stop_token)");
        static_assert(
            HasReceive<Tag>,
            "Transport: the receiver needs receive(const update_message&, update_target&, "
            "deadline, std::stop_token)");
        static_assert(HasReceiverRelease<Tag>, "Transport: the receiver needs release() noexcept");
    }
    return Transport<Tag>;
}

}  // namespace weightwire
