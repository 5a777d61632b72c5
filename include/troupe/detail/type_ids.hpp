/// The types that travel in messages; their order is part of the wire format of CAF 1.x.
#pragma once

#include <caf/allowed_unsafe_message_type.hpp>
#include <caf/type_id.hpp>

namespace troupe {

enum class errc : unsigned char;
enum class part_state : unsigned char;
enum class dtype : unsigned char;
enum class reduce_op : unsigned char;
enum class device_phase : unsigned char;
enum class world_phase : unsigned char;
struct failure;
struct gpu_token;
class any_gpu_ref;
class host_buffer;
struct request_options;
struct collective_done;
enum class collective_kind : unsigned char;
struct collective;
struct all_reduce;
struct reduce;
struct broadcast;
struct all_gather;
struct reduce_scatter;
struct all_to_all;
struct all_to_all_v;
struct gather;
struct scatter;
struct send_recv;
struct barrier;
struct group;
struct rank_local;
struct message_end;
struct exchange;
struct device_changed;
struct device_stats;
struct world_member;
struct world_status;
struct allocate;
struct upload;
struct download;
struct fill;
struct copy;
struct launch;
struct stats;
struct watch_generation;
struct reset;
struct hand_over;
struct shutdown;
struct get_status;
struct subscribe;
struct record_flight;
struct split;
struct sub_world;
struct world_split;
struct allocation_options;
struct allocate_all;
struct world_buffers;
enum class link_kind : unsigned char;
enum class peer_access : unsigned char;
enum class link_check : unsigned char;
struct p2p_device;
struct p2p_link;
struct p2p_graph;
struct get_graph;
struct verify_links;
struct measure_links;
struct copy_pair;
struct copy_batch;
struct replicate;
struct distribute;
struct get_stats;
struct topology_stats;
struct program_message;
struct program_report;
struct program_ended;
enum class access_mode : unsigned char;
struct offer;
struct claim;
enum class room_policy : unsigned char;
struct accept;
struct launch_callable;
class actor_task;
struct step_done;
struct run_step;

namespace detail {
struct get_device_actor;
struct communicator_built;
struct standbys_built;
struct communicator_ended;
struct communicator_gone;
struct beside_wanted;
struct beside_built;
struct retry_build;
struct build_overdue;
struct graph_changed;
struct until_built;
} // namespace detail

} // namespace troupe

CAF_BEGIN_TYPE_ID_BLOCK(troupe, caf::first_custom_type_id)
CAF_ADD_TYPE_ID(troupe, (troupe::errc))
CAF_ADD_TYPE_ID(troupe, (troupe::part_state))
CAF_ADD_TYPE_ID(troupe, (troupe::dtype))
CAF_ADD_TYPE_ID(troupe, (troupe::reduce_op))
CAF_ADD_TYPE_ID(troupe, (troupe::device_phase))
CAF_ADD_TYPE_ID(troupe, (troupe::world_phase))
CAF_ADD_TYPE_ID(troupe, (troupe::failure))
CAF_ADD_TYPE_ID(troupe, (troupe::gpu_token))
CAF_ADD_TYPE_ID(troupe, (troupe::any_gpu_ref))
CAF_ADD_TYPE_ID(troupe, (troupe::host_buffer))
CAF_ADD_TYPE_ID(troupe, (troupe::request_options))
CAF_ADD_TYPE_ID(troupe, (troupe::collective_done))
CAF_ADD_TYPE_ID(troupe, (troupe::collective_kind))
CAF_ADD_TYPE_ID(troupe, (troupe::collective))
CAF_ADD_TYPE_ID(troupe, (troupe::all_reduce))
CAF_ADD_TYPE_ID(troupe, (troupe::reduce))
CAF_ADD_TYPE_ID(troupe, (troupe::broadcast))
CAF_ADD_TYPE_ID(troupe, (troupe::all_gather))
CAF_ADD_TYPE_ID(troupe, (troupe::reduce_scatter))
CAF_ADD_TYPE_ID(troupe, (troupe::all_to_all))
CAF_ADD_TYPE_ID(troupe, (troupe::all_to_all_v))
CAF_ADD_TYPE_ID(troupe, (troupe::gather))
CAF_ADD_TYPE_ID(troupe, (troupe::scatter))
CAF_ADD_TYPE_ID(troupe, (troupe::send_recv))
CAF_ADD_TYPE_ID(troupe, (troupe::barrier))
CAF_ADD_TYPE_ID(troupe, (troupe::group))
CAF_ADD_TYPE_ID(troupe, (troupe::rank_local))
CAF_ADD_TYPE_ID(troupe, (troupe::message_end))
CAF_ADD_TYPE_ID(troupe, (troupe::exchange))
CAF_ADD_TYPE_ID(troupe, (troupe::device_changed))
CAF_ADD_TYPE_ID(troupe, (troupe::device_stats))
CAF_ADD_TYPE_ID(troupe, (troupe::world_member))
CAF_ADD_TYPE_ID(troupe, (troupe::world_status))
CAF_ADD_TYPE_ID(troupe, (troupe::allocate))
CAF_ADD_TYPE_ID(troupe, (troupe::upload))
CAF_ADD_TYPE_ID(troupe, (troupe::download))
CAF_ADD_TYPE_ID(troupe, (troupe::fill))
CAF_ADD_TYPE_ID(troupe, (troupe::copy))
CAF_ADD_TYPE_ID(troupe, (troupe::launch))
CAF_ADD_TYPE_ID(troupe, (troupe::stats))
CAF_ADD_TYPE_ID(troupe, (troupe::watch_generation))
CAF_ADD_TYPE_ID(troupe, (troupe::reset))
CAF_ADD_TYPE_ID(troupe, (troupe::shutdown))
CAF_ADD_TYPE_ID(troupe, (troupe::get_status))
CAF_ADD_TYPE_ID(troupe, (troupe::subscribe))
CAF_ADD_TYPE_ID(troupe, (troupe::record_flight))
CAF_ADD_TYPE_ID(troupe, (troupe::split))
CAF_ADD_TYPE_ID(troupe, (troupe::sub_world))
CAF_ADD_TYPE_ID(troupe, (troupe::world_split))
CAF_ADD_TYPE_ID(troupe, (troupe::allocation_options))
CAF_ADD_TYPE_ID(troupe, (troupe::allocate_all))
CAF_ADD_TYPE_ID(troupe, (troupe::world_buffers))
CAF_ADD_TYPE_ID(troupe, (troupe::link_kind))
CAF_ADD_TYPE_ID(troupe, (troupe::peer_access))
CAF_ADD_TYPE_ID(troupe, (troupe::link_check))
CAF_ADD_TYPE_ID(troupe, (troupe::p2p_device))
CAF_ADD_TYPE_ID(troupe, (troupe::p2p_link))
CAF_ADD_TYPE_ID(troupe, (troupe::p2p_graph))
CAF_ADD_TYPE_ID(troupe, (troupe::get_graph))
CAF_ADD_TYPE_ID(troupe, (troupe::verify_links))
CAF_ADD_TYPE_ID(troupe, (troupe::measure_links))
CAF_ADD_TYPE_ID(troupe, (troupe::copy_pair))
CAF_ADD_TYPE_ID(troupe, (troupe::copy_batch))
CAF_ADD_TYPE_ID(troupe, (troupe::replicate))
CAF_ADD_TYPE_ID(troupe, (troupe::distribute))
CAF_ADD_TYPE_ID(troupe, (troupe::get_stats))
CAF_ADD_TYPE_ID(troupe, (troupe::topology_stats))
CAF_ADD_TYPE_ID(troupe, (troupe::program_message))
CAF_ADD_TYPE_ID(troupe, (troupe::program_report))
CAF_ADD_TYPE_ID(troupe, (troupe::program_ended))
CAF_ADD_TYPE_ID(troupe, (troupe::access_mode))
CAF_ADD_TYPE_ID(troupe, (troupe::offer))
CAF_ADD_TYPE_ID(troupe, (troupe::claim))
CAF_ADD_TYPE_ID(troupe, (troupe::room_policy))
CAF_ADD_TYPE_ID(troupe, (troupe::accept))
CAF_ADD_TYPE_ID(troupe, (troupe::hand_over))
CAF_ADD_TYPE_ID(troupe, (troupe::step_done))
CAF_END_TYPE_ID_BLOCK(troupe)

// Messages for use within one process only. They have no serialized form, and the configuration
// does not register them for CAF's network.
CAF_BEGIN_TYPE_ID_BLOCK(troupe_local, caf::id_block::troupe::end)
CAF_ADD_TYPE_ID(troupe_local, (troupe::launch_callable))
CAF_ADD_TYPE_ID(troupe_local, (troupe::run_step))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::get_device_actor))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::communicator_built))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::standbys_built))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::communicator_ended))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::communicator_gone))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::beside_wanted))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::beside_built))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::retry_build))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::build_overdue))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::graph_changed))
CAF_ADD_TYPE_ID(troupe_local, (troupe::actor_task))
CAF_ADD_TYPE_ID(troupe_local, (troupe::detail::until_built))
CAF_END_TYPE_ID_BLOCK(troupe_local)

CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::launch_callable)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::run_step)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::get_device_actor)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::communicator_built)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::standbys_built)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::communicator_ended)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::communicator_gone)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::beside_wanted)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::beside_built)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::retry_build)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::build_overdue)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::graph_changed)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actor_task)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::detail::until_built)
