#pragma once
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Every customisation point, in one list. There is no ADL hook, no virtual function and no
/// registration: a point is tried in the order specialised trait, member, default.
///
/// - `backend_traits<Tag>` (concepts/transport.hpp): a backend. `wire_name`, `capabilities`, and
/// the
///   types `init_info`, `sender` and `receiver`.
/// - `source_traits<S>::lifetime`, then `S::lifetime` (concepts/weight_source.hpp): how long
/// yielded
///   tensors stay valid. Default: `until_next`.
/// - `S::groups()`, `S::weights(group)`, `S::held_names()` (concepts/weight_source.hpp): gather
///   groups, and what a rank holds. Default: cut by position; everything.
/// - `S::read(tensor, offset, to)` (concepts/weight_source.hpp): how a tensor's bytes are copied.
///   Default: from its address.
/// - `Sink::open_destination`, `Sink::placed` (concepts/weight_sink.hpp): destinations that exist
///   only around their writes.
/// - `Sink::begin`, `Sink::prepare` with a stop token (concepts/weight_sink.hpp): a take-over ends
///   their wait for readers. Default: the forms without, which it waits for.
/// - `Sink::commit_estimate()` (concepts/weight_sink.hpp): a commit that would come too late is not
///   begun. Default: no time.
/// - `Sink::acquire()` (concepts/weight_sink.hpp): snapshots, which `/weight_checker` needs.
/// - `Sink::device()` (concepts/weight_sink.hpp): the device of a rank's receiver. Default: the
/// local
///   rank where a worker has several, else 0; `worker_options::devices` says it for every sink.
/// - `Sink::tensor_digests`, `Sink::clear_tensor` (concepts/weight_sink.hpp): digests and zeros of
///   tensors that the processor cannot reach. Default: host memory only.
/// - `Sink::parameters()` (engine/worker_engine.hpp): what the sink expects, which updates in
/// vLLM's
///   form need.
/// - `Sender::drop_peer`, `restore_peer` (concepts/transport.hpp): a failed peer does not stop the
///   others, and may return.
/// - `Sender::digests()` (concepts/transport.hpp): workers compare before they commit.
/// - `Sender::stage` (concepts/transport.hpp): what must be ready before a part's control call.
/// - `Sender::export_memory`, `shared_plan`, `adopt_plan` (concepts/transport.hpp): every trainer
///   rank serves, not rank 0 alone.
/// - `Sink::converts_dtypes()` (concepts/weight_sink.hpp): destinations may have another dtype than
///   the trainer's. Default: no.
/// - `Half::description()` (concepts/transport.hpp): one line for the `chosen` event.
/// - `Client::request` (concepts/sync_client.hpp): probing, world size, pause and resume.
/// - Models of `TrainerGroup`, `EventSink`, `HttpClient` (concepts/): how ranks agree, who is told,
///   how HTTP is spoken.

#include <weightwire/concepts/event_sink.hpp>
#include <weightwire/concepts/http_client.hpp>
#include <weightwire/concepts/sync_client.hpp>
#include <weightwire/concepts/trainer_group.hpp>
#include <weightwire/concepts/trainer_init_info.hpp>
#include <weightwire/concepts/transport.hpp>
#include <weightwire/concepts/weight_sink.hpp>
#include <weightwire/concepts/weight_source.hpp>
