//! Every limit of the decisions, with its arithmetic. Times are milliseconds.

/// A daemon that has just started waits this long for its peers before it takes missing ones for dead: longer
/// than three dials at their longest back-off (1 s).
pub const JOIN_GRACE_MS: u64 = 4_000;

/// It waits on while more of them join, until none has for this long: a node of a thousand peers has a thousand handshakes
/// before it, which take longer than the grace where processors are busy.
pub const JOIN_QUIET_MS: u64 = 1_000;

/// And no longer than this in all: nodes that are started one after the other over an hour are not waited for.
pub const JOIN_MAX_MS: u64 = 30_000;

/// A step that a daemon which is to stop has sealed shards of, and that has not been committed: it is waited for as long as
/// something new was heard of it within this time.
pub const LEAVING_NEWS_MS: u64 = 15_000;

/// A drained node waits so long for its peers to say that they have heard of it. One that is stopped is down by then; one of an older
/// release never says it.
pub const DRAIN_NOTED_MS: u64 = 3_000;

/// The blocks of a drained node that has gone are counted for no longer than this: its links end with a word, and home nodes tell so. Where it is killed
/// instead they take its link for down after 2.5 s at most; home nodes that are far from it, as there are in clusters of more than 256
/// nodes, after 6 s: till then one more node may go than the step bears.
pub const DRAIN_SETTLE_MS: u64 = 4_000;

/// The number of a question that is asked for repairs. No plan's has it: those begin at one.
pub(crate) const REPAIR_QUERY: u64 = 0;

/// Home nodes of which one must be sound: what they say alike is so, if one node at most says what is not.
pub const WORDS_NEEDED: usize = 2;

/// Where home nodes differ for so long, whoever hears them counts for itself: longer than what one of them missed takes to be said again.
pub const DOUBT_MS: u64 = 2_500;

/// One home node alone calls a checkpoint durable for so long before a node that is none looks into the tier: all of ten thousand
/// would.
pub const TIER_DOUBT_MS: u64 = 10_000;

/// A listing of the tier that does not have a checkpoint yet may be as old as this: two so far apart that lack it say that it is not there.
pub const LISTINGS_LAG_MS: u64 = 2 * TIER_QUESTION_MS;

/// The tier is asked again after this time whether it has a checkpoint.
pub const TIER_QUESTION_MS: u64 = 2_000;

/// A durable tier that is configured wrongly, as where a key is missing, is so until nothing has found it so for this time.
pub const MISCONFIGURED_FOR_MS: u64 = 30_000;

/// Highest number of a run. Higher ones are given out by nobody: ten a second for eight hundred thousand years.
pub const RUN_NUMBER_MAX: u64 = 1 << 48;

/// One node alone makes a proposer skip no more numbers than this at once: nobody else has heard of what it says is taken.
pub const RUN_SKIP_MAX: u64 = 1 << 20;

/// A number that is so far above all that are known here is promised to nobody. Far more than a liar makes an honest proposer skip in many
/// attempts: one that is refused has no way down.
pub const RUN_WISH_MAX: u64 = 1 << 32;

/// How often one node may say to one proposer that its number is taken, before the others decide.
pub const RUN_TAKEN_MAX: u32 = 4;

/// Statements that no sound node makes before nothing is believed that their sender alone says: more than one bit flip in a record
/// that is said again each second until it is heard.
pub const PROOFS_MAX: u32 = 8;

/// Checkpoints that are given up on the word of one peer within this time; more it must have others say.
pub const ENDS_HEARD_MAX: u32 = 30;

/// The time.
pub const ENDS_HEARD_EVERY_MS: u64 = 60_000;

/// Changes to what was said of a step that a node can have missed: more is nobody's count.
pub const FAILED_CHANGES_MISSED_MAX: u32 = 1_000;

/// Jobs that a node knows from one peer alone: as many as a peer remembers, and as many again that it has.
pub const JOBS_PER_PEER_MAX: usize = 2 * EMPTY_JOBS_MAX;

/// Steps that a home node knows from one holder of parts of them, and takes up when another one tells of them too: twice what a node keeps
/// of a job while nothing becomes safe.
pub const VOUCHED_PER_PEER_MAX: usize = 16;

/// A home node that has not answered for so long what is held of a committed checkpoint may not know it, and is told of it once more.
pub const UNHEARD_OF_MS: u64 = 5_000;

/// Commits of one teller of which nothing is here.
pub const COMMITS_PER_PEER_MAX: usize = 64;

/// Parcels on their way here that one peer alone tells of.
pub const PARCELS_PER_PEER_MAX: usize = 64;

/// Sessions of one leader that a node takes part in: a peer leads four lanes at once, and opens shards for as many ranks as it has. One
/// that is too many is proposed again.
pub const SESSIONS_PER_LEADER_MAX: usize = 1_024;

/// Steps that one peer has this node read and check at once: each may be all that is in its memory.
pub const CHECKS_PER_PEER_MAX: usize = 64;

/// A node that is to publish a checkpoint, and has none of its job's trainers, asks its peers for the key of the job's MACs for so long;
/// then the manifest is published without: a copy that must be accepted by hand is more than none.
pub const KEY_WAIT_MS: u64 = 60_000;
/// What still matters is said again this often.
pub const REPEAT_MS: u64 = 1_000;
/// Nodes that have answered a plan which still waits for others are asked again after so long, and then after twice as long each time.
pub const SURVEY_REFRESH_MS: u64 = 2_000;

/// A checkpoint that has not committed and of which nothing new has been heard for so long is given up: no further shard has
/// been sealed, and none is being digested.
pub const COMMIT_MAX_MS: u64 = 120_000;

/// Epochs whose groups a node remembers, with the newest: a step is described and committed within a few, or given up.
pub const EPOCHS_KEPT: usize = 8;

/// A home node commits nothing later than that, and gives it up so much later: in between every home node hears of a
/// commit that another one has just made, so that no checkpoint is committed at one and given up at another.
pub const COMMIT_SETTLE_MS: u64 = 10_000;

/// Time that passes unseen for so long says that this node was stopped: it looks around each second.
pub const GAP_MS: u64 = 3_000;

/// So long after it was stopped a node protects nothing: the 2.5 s that silence takes to be noticed, and what links that have ended
/// meanwhile take to say so.
pub const LISTEN_MS: u64 = 3_000;

/// The same in a cluster in which not all nodes are near one another: the silence of those that are far takes 6 s.
pub const LISTEN_FAR_MS: u64 = 6_500;

/// Most nodes of a cluster in which all are near one another, whatever their groups are. A link end at which somebody asks at every beat costs
/// 0.135 thousandths of a core (0.151 cores for 34 daemons with 33 links each, docs/bench/scale.json): 0.035 cores of every node at this size,
/// 0.17 at 1,250 nodes.
pub const NEAR_NODES_MAX: usize = 256;

/// So many nodes, the first in order, are near to all others of a larger cluster: the first of them that is in sight gives places up, and the
/// next one if it is the first that is lost.
pub const WATCHERS: usize = 2;

/// Most nodes of a cluster of which that is so: it takes 0.28 cores of each of the first ones then.
pub const WATCHED_NODES_MAX: usize = 2_048;

/// A manifest is sealed so often anew because a daemon that had announced a part of it ended meanwhile. Whoever announces something else each time
/// would have it sealed without end.
pub const SEALED_ANEW_MAX: u8 = 3;

/// A node says again that it waits for a commit so long after a home node has noted all that it has to say.
pub const ANNOUNCE_AGAIN_MS: u64 = 5_000;

/// Home nodes tell one another when they last heard of a checkpoint that they have collected for so long.
pub const NEWS_SHARED_AFTER_MS: u64 = 30_000;

/// Slowest rate at which a shard is still taken to be digested, bytes per millisecond (50 MB/s).
pub const DIGEST_BYTES_PER_MS_MIN: u64 = 50_000;

/// Chunks of which a message tells the digests and fingerprints, 51 bytes each: below 1 MiB.
pub const TABLE_PAGE_CHUNKS: usize = 16_384;

/// Chunks of a shard whose fingerprints a reader is told with their digests, 51 bytes each in one frame, with 4 KiB for the rest:
/// 5 GB at 4 KiB, 345 GB at 256 KiB.
pub const FINGERPRINTS_TOLD_MAX: usize =
    (storaged_wire::framing::LOCAL_FRAME_BYTES_MAX - (4 << 10)) / 51;

/// Longest message that goes to a peer as it is: a longer one would stand before everything else on its link.
pub const INLINE_BYTES_MAX: usize = 128 << 10;

/// A commit that is longer is told as a parcel, along a tree: sent as it is by each of m + 1 home nodes it would come to
/// every node m times more often than it has a use for. A parcel costs its teller 100 bytes.
pub const SPREAD_BYTES_MIN: usize = 4 << 10;

/// A page of a longer one.
pub const PARCEL_PAGE_BYTES: usize = 512 << 10;

/// To how many nodes a node tells a commit that is a parcel. A home node sends that many copies of a manifest, and a thousand
/// nodes have it after ten hops.
pub const RELAY_FAN_OUT: usize = 2;

/// Manifests, descriptions and tables may take so much beside the budget, those of each tenant an equal part; what is above counts in it.
pub const RECORDS_FREE_BYTES: u64 = 64 << 20;

/// Of that so much only descriptions may take. Slots that fill the budget leave nothing in it, and tables of large shards take all that is
/// beside it: the description of a step whose shards are sealed would have no room, and the save would fail after all was copied.
pub const DESCRIPTIONS_FREE_BYTES: u64 = 16 << 20;

/// And so much manifests and tables.
pub const TABLES_FREE_BYTES: u64 = RECORDS_FREE_BYTES - DESCRIPTIONS_FREE_BYTES;

/// What a node keeps of a chunk of a shard in its tables: digest and fingerprint.
pub const TABLE_BYTES_PER_CHUNK: u64 =
    (size_of::<storaged_wire::Digest>() + size_of::<storaged_codec::Fingerprint>()) as u64;

/// Names of nodes in one message: of 64 bytes each, half a message.
pub const RELAY_NAMES_MAX: usize = 8_192;

/// All parcels that are kept for others, and all that are on their way here: each at most so many bytes.
pub const PARCELS_BYTES_MAX: u64 = 256 << 20;

/// Those that one peer alone has: were it all of them, others' would wait for what never comes. A commit of a hundred thousand ranks and what
/// describes it are shorter.
pub const PARCEL_BYTES_PER_PEER_MAX: u64 = PARCELS_BYTES_MAX / 2;

/// So many parcels may be on their way here at once: each is looked at with every message that brings a page.
pub const PARCELS_COMING_MAX: usize = 256;

/// Fences or marks in one message: below the longest that goes as it is, for nobody says them again.
pub const FENCES_MAX: usize = 256;

/// A parcel that nobody asks for or tells of is kept this long: home nodes say again each second what is not answered.
pub const PARCEL_KEPT_MS: u64 = 10_000;

/// Schema or torch metadata that no checkpoint here names is kept this long: a restart plans, and then every rank asks.
pub const ENCLOSURE_KEPT_MS: u64 = 20_000;

/// Most stripes of a session: members keep a bit for each, and a manifest may name any length. At 256 KiB it is 16 TiB.
pub const STRIPES_MAX: u64 = 1 << 26;

/// Most chunks of a shard: their digests, 34 bytes each, are told to a reader in one frame. 8 GB at 4 KiB, 517 GB at 256 KiB.
pub const SHARD_CHUNKS_MAX: u64 =
    ((storaged_wire::framing::LOCAL_FRAME_BYTES_MAX - (4 << 10)) / 34) as u64;

/// How long a full budget is waited for, within the caller's own limit. Longer than it takes until every node has heard
/// that a job's trainers are gone, whose RAM then gives way.
pub const BUDGET_WAIT_MS: u64 = 3_000;

/// Parity of a step that other nodes have had no room for makes way after this time for one that is preferred. Longer than a leader
/// takes to ask again, so that room which comes meanwhile is found.
pub const PARITY_YIELDS_AFTER_MS: u64 = 10_000;

/// And after this time for a newer one of the same job, counted from when steps of it began to find no room.
pub const PARITY_YIELDS_IN_JOB_MS: u64 = 2_500;

/// And after this time for any, because the preferred one may not fit even so. Until then the preferred one has taken the room elsewhere, and
/// nothing of it is refused any more.
pub const PARITY_YIELDS_AT_LAST_MS: u64 = 45_000;

/// What a node has no room for is news for so long: whoever leads it asks again after at most 2 s.
pub const NO_ROOM_HEARD_MS: u64 = 10_000;

/// And tells the answer no more often than this.
pub const NO_ROOM_TOLD_EVERY_MS: u64 = 3_000;

/// How often the patience doubles from one time to the next that a step's parity makes way: up to 10 or 48 minutes.
pub const YIELD_DOUBLINGS: u32 = 6;

/// For how long a step whose parity made way is not coded there again: what it made way for asks again within this time.
pub const HELD_OFF_MS: u64 = 30_000;

/// A coding node that is gone for so long is not waited for: a step is protected without it, and topped up when it is
/// back. Longer than a cut of a second that links recover from by themselves; with the 2.5 s that silence takes to be
/// noticed, less than half of the 10 s without a protected step that the loss of a node may cost.
pub const DEGRADE_AFTER_MS: u64 = 2_000;

/// A committed checkpoint that lacks nodes to be protected goes to the durable tier unprotected after this time.
pub const UPLOAD_UNPROTECTED_AFTER_MS: u64 = 3_000;

/// A committed checkpoint whose shard is lost is given up after this time: a session that has had the shard ends, or says
/// so, within two reports.
pub const LOST_AFTER_MS: u64 = 3_000;

/// A committed checkpoint that is older than a protected one stays for so long where several are kept: that it is protected too is said
/// again each second, or when the link is up again.
pub const KEPT_UNPROTECTED_MS: u64 = 10_000;

/// A trainer waits so long for a slot before a checkpoint that can be made no safer gives way to a newer one.
pub const SUPERSEDE_AFTER_MS: u64 = 1_000;

/// And so long before a step does that home nodes called protected before they lost their memory: nodes that are away may come back with its blocks.
pub const GONE_WORDS_MS: u64 = 6_000;

/// And no longer than this, whatever goes meanwhile. So long stays what a run may have gone on from, too.
pub const GONE_WORDS_MAX_MS: u64 = 30_000;

/// A trainer that was refused a slot has gone on waiting if it asks again in this time.
pub const ASKED_AGAIN_MS: u64 = 60_000;

/// And so long before the one that is on its way to the durable tier does.
pub const UPLOAD_YIELDS_AFTER_MS: u64 = 3_000;

/// A home node that knows a step notes within this time that blocks of it do not count, or is found down: as long as a silence takes to
/// be noticed.
pub const GIVING_WAY_HEARD_MS: u64 = 2_500;

/// Checkpoints that have left RAM whose end is remembered, for those who ask late.
pub const ENDS_KEPT: usize = 1_024;

/// A commit of which nothing has come to this node for so long, and whose teller is gone, is asked for again. Longer than a leader tries
/// once to find its members.
pub const UNCONFIRMED_MS: u64 = 30_000;

/// Committed checkpoints given up on a peer's word that are remembered: as many as two peers may end in a minute.
pub const GIVEN_UP_KEPT: usize = 64;

/// For so long such a checkpoint is not taken up again: a home node that tells of it may not have heard yet that it was given up.
pub const GIVEN_UP_HEARD_MS: u64 = 3_000;

/// And so long one is not that its owners disown. Home nodes that have passed it on to each other forget it at different times, and would
/// teach it to each other again for ever.
pub const DISOWNED_MS: u64 = 60_000;

/// Such commits that are remembered: twice what one peer can have here at once, and again as many that others pass on for it.
pub const DISOWNED_KEPT: usize = 4 * COMMITS_PER_PEER_MAX;

/// A member answers a session's proposal within this time.
pub const PROPOSE_MAX_MS: u64 = 5_000;

/// A basis is worth its costs if at least one stripe in this many is clean.
pub const CLEAN_SHARE_WORTH_A_BASIS: u64 = 50;

/// A session in which nothing has moved for this long is ended: an upper bound beside the executor's own stall limit. How
/// long it may take in all depends on its length and its links alone.
pub const SESSION_STALL_MAX_MS: u64 = 600_000;

/// A failed session is tried again after this time.
pub const SESSION_RETRY_MS: u64 = 1_000;

/// How often that wait doubles while a lane fails again and again: to 32 s.
pub const SESSION_RETRY_DOUBLINGS: u32 = 5;

/// The same where one member blames another: to 8 s. A leader does not hear that a link between two others is back, so a longer wait leaves
/// a step unprotected for as long after the fault has ended.
pub const LINK_RETRY_DOUBLINGS: u32 = 3;

/// And where one has no room: to 2 s. What makes way there for a step may take no longer than a trainer waits for its slot.
pub const NO_ROOM_RETRY_DOUBLINGS: u32 = 1;

/// Nodes tell each other so often which jobs have trainers, beside when that changes.
pub const ATTACHED_EVERY_MS: u64 = 10_000;

/// Jobs that hold nothing are remembered, the last so many: a name and a few numbers each.
pub const EMPTY_JOBS_MAX: usize = 1_024;

/// But each for so long, and so is one that was evicted: what a peer still says of it then finds that out.
pub const EMPTY_JOB_MIN_MS: u64 = 60_000;

/// Within that time a tenant opens so many jobs of which nothing is kept, at most: each is told to all nodes.
pub const NEW_JOBS_MAX: usize = 256;

/// Peers answer queries within this time.
pub const QUERY_MAX_MS: u64 = 3_000;

/// Nodes that are asked whether an order to drop a job is proven: one that has heard its token is enough.
pub const ORDER_CHECKERS_MAX: usize = 32;

/// Orders of one peer that others are asked about at once: somebody may drop all jobs of a cluster.
pub const ORDER_CHECKS_PER_PEER_MAX: usize = 256;

/// A step that a restart has failed from is passed over for so long, then for twice as long (10 minutes, 20 minutes): longer than
/// a restart of a large job takes, so that another step gets its turn.
pub const QUARANTINE_MS: u64 = 600_000;

/// Restarts that may fail from one step before it waits for an operator.
pub const FAILURES_MAX: u32 = 3;

/// Said again within this time it is the same restart: each node of a job may have a launcher that says so.
pub const FAILURE_SAID_WITHIN_MS: u64 = 30_000;

/// Steps of one namespace that this is remembered of; the oldest go first.
pub const FAILED_STEPS_MAX: usize = 64;

/// Steps of one namespace that may be pinned in RAM at once.
pub const PINS_MAX: usize = 64;

/// Steps of one namespace of which it is remembered that they were pinned, or are not any more: as many have been let go as may be pinned.
pub const PINS_REMEMBERED_MAX: usize = 2 * PINS_MAX;

/// Changes of a pin that a node can have missed: more is nobody's count.
pub const PIN_CHANGES_MISSED_MAX: u32 = 1_000;

/// For so long nodes are asked to note a pin; whoever has not answered then counts as a node without the step.
pub const PIN_WAIT_MS: u64 = 10_000;

/// Pins are told again so often: a node that missed one would let go what all others keep.
pub const PINS_EVERY_MS: u64 = 10_000;

/// A pinned step of which a node has nothing is asked for after twice as long each time, but at least this often: blocks come back with the nodes
/// that have them.
pub const PINNED_ASKED_AGAIN_MAX_MS: u64 = 300_000;

/// Namespaces of which one message tells it: with all their steps below the longest that goes as it is.
pub const FAILURES_TOLD_MAX: usize = 8;

/// Of so many of the newest steps a verdict says what waiting would gain: each is looked at lane by lane.
pub const WAITING_STEPS_MAX: usize = 4;

/// Nobody is told to wait for more nodes than that at once: the names that one list of a record holds.
pub const WAITED_FOR_MAX: usize = 255;

/// The durable tier answers a listing within this time.
pub const DURABLE_LIST_MAX_MS: u64 = 20_000;

/// A failed upload is tried again after this time.
pub const UPLOAD_RETRY_MS: u64 = 5_000;

/// Each home node has so long to write a manifest, before the next one does.
pub const PUBLISHING_MS: u64 = 10_000;

/// And so much longer for each rank, of which it may have to read the index of an increment.
pub const PUBLISHING_RANK_MS: u64 = 20;

/// Longest wait that a request may ask for.
pub const REQUEST_MAX_MS: u64 = 600_000;

/// A shard that a repair has brought back in part is kept this long for the next repair to go on with.
pub const PART_FILLED_MAX_MS: u64 = 15_000;

/// A block in which chunks have rotted is kept this long for the repair that puts them back: longer than a repair waits for a
/// newer step's encode or for a node that is restarted. After it the block is brought back whole.
pub const ROTTEN_KEPT_MS: u64 = 600_000;

/// Bytes of a block that are scrubbed at once: some 10 ms of one thread. Smaller ones would cost more to order than to read.
pub const SCRUB_PIECE_BYTES: u64 = 32 << 20;

/// While something is saved the scrub looks again after this time whether it may go on.
pub const SCRUB_YIELD_MS: u64 = 1_000;

/// An opening of a shard that the node itself has lost leaves it to the lane's heal if that begins within this time: to
/// link up with a node that has come back and to ask what it holds takes a fraction of it.
pub const HEAL_FIRST_MS: u64 = 500;

/// What was measured of a link is forgotten after this time: ten steps that are a minute apart.
pub const RATE_AGE_MAX_MS: u64 = 600_000;

/// A stretch of a session shorter than this says nothing of its links.
pub const EVIDENCE_MS_MIN: u64 = 500;

/// A session that runs is judged this often: members report once a second, so that each stretch has a report of every
/// member.
pub const PACE_STRETCH_MS: u64 = 2_000;

/// A member that holds a session up in so many stretches in a row is gone around.
pub const PACE_STRIKES: u32 = 2;

/// What another plan must save: more than the second until it is tried and the second that agreeing on it may take.
pub const REPLAN_GAIN_MS_MIN: u64 = 4_000;

/// Times that a lane of one checkpoint is planned again because of a slow hop; after that it goes on as it does.
pub const REPLANS_MAX: u32 = 2;

/// How far a member's clock may be ahead of its leader's in what it says of a session.
pub const REPORT_SLACK_MS: u64 = 2_000;

/// Sessions that one leader runs at once: each holds the blocks of some stripes at every member, 32 MiB of them or what a few stripes take.
pub const SESSIONS_LED_MAX: usize = 4;

/// Damaged checkpoints of the durable tier that a node remembers; their markers in the tier say it for good.
pub const QUARANTINED_MAX: usize = 256;

/// Of these one peer tells of so many, its last ones.
pub const QUARANTINED_PER_PEER_MAX: usize = 16;

/// Of these so many of each job, its last ones, are kept for the daemon that starts next: 18 KiB at most, each with 1 KiB of what was found.
pub const QUARANTINED_KEPT_MAX: usize = 16;

/// A node that is up and has not answered whether it promises a run does not hold its opening up for longer.
pub const PROMISE_MAX_MS: u64 = 3_000;

/// So many promises of a job are known by whom they were made to; with more, none of them can be withdrawn.
pub const PROMISES_KEPT: usize = 64;

/// Runs that a node has not opened after all, and says so of to peers that come up.
pub const WITHDRAWN_KEPT: usize = 64;

/// A node that is up and does not say that it has heard of an opened run does not hold the answer up for longer.
pub const RAISE_MAX_MS: u64 = 1_000;

/// The durable tier gives a run's number within this time, or nodes that remember the namespace do.
pub const RUN_CLAIM_MAX_MS: u64 = 3_000;

/// A registry that has not given a run its number is asked again after this time, until the client's own is over. What was asked before and
/// comes late counts as well.
pub const RUN_REGISTER_AGAIN_MS: u64 = 2_000;

/// Where only the durable tier can give a run's number, it is asked so often before the run is refused: one failure costs a
/// restart a second, and not its job.
pub const RUN_CLAIMS_MAX: u32 = 3;

/// Proposers of one number wait for different parts of this time before they go above each other, then of twice as much,
/// up to 64 times: some answers' time on a link at first.
pub const RUN_BACK_OFF_MS: u64 = 20;

/// Records of changed tokens of one job that a node passes on without a token that proves them, and that are kept of those passed on.
pub const SUCCESSIONS_PASSED_ON_MAX: usize = 4;

/// Of a name that no node remembers the durable tier says within this time whether its token was changed, or a reader's hello goes on without.
pub const SUCCESSION_WAIT_MS: u64 = 3_000;

/// The durable tier is told again after this time of a run that was opened without it.
pub const RUN_RECORD_RETRY_MS: u64 = 5_000;

/// A trainer whose run is unknown here is answered within this time: nodes that have just started have joined by then,
/// unless more and more come in (`JOIN_MAX_MS`).
pub const RUN_CONFIRM_MS: u64 = JOIN_GRACE_MS + 1_000;

/// A trainer whose run peers have told of, and whose token no change that is known here explains, is refused only after this: they tell
/// of changes of tokens behind the runs.
pub const CHANGE_WAIT_MS: u64 = 500;

/// Requests that wait at once; one more is refused.
pub const WAITERS_MAX: usize = 65_536;

/// Boards on one node: two for each of 128 ranks. Each has a descriptor.
pub const BOARDS_MAX: usize = 256;

/// Checkpoints that one namespace may have before commit on one node; older ones are given up first.
pub const UNCOMMITTED_MAX: usize = 8;

/// First guess of the rate at which one thread reads and verifies RAM, bytes per millisecond (2 GB/s): until a shard was digested here.
pub const RAM_BYTES_PER_MS: u64 = 2_000_000;
/// First guess of the rate of a session, bytes per millisecond (500 MB/s).
pub const SESSION_BYTES_PER_MS: u64 = 500_000;
/// First guess of the rate of the durable tier, bytes per millisecond (100 MB/s): until a shard was read from it here, or copied to it.
pub const DURABLE_BYTES_PER_MS: u64 = 100_000;

const _: () = assert!(
    DEGRADE_AFTER_MS < UPLOAD_UNPROTECTED_AFTER_MS,
    "first as much protection as there can be"
);
const _: () = assert!(
    QUARANTINED_KEPT_MAX <= QUARANTINED_MAX,
    "what was kept of a job has room"
);
const _: () = assert!(
    FAILURE_SAID_WITHIN_MS < QUARANTINE_MS,
    "a failure after the back-off is another one"
);
const _: () = assert!(
    DOUBT_MS > 2 * REPEAT_MS,
    "what was lost is said again first"
);
const _: () = assert!(GAP_MS > 2 * REPEAT_MS, "a busy node is not a stopped one");
const _: () = assert!(
    2 * (ANNOUNCE_AGAIN_MS + REPEAT_MS) < LEAVING_NEWS_MS,
    "of other nodes' digests word comes with the answers to what is announced again"
);
const _: () = assert!(
    ANNOUNCE_AGAIN_MS + REPEAT_MS < COMMIT_SETTLE_MS,
    "whoever waits hears that there is news before it gives up"
);
const _: () = assert!(
    NEWS_SHARED_AFTER_MS + ANNOUNCE_AGAIN_MS + REPEAT_MS < COMMIT_MAX_MS,
    "a home node hears of another one's news in time"
);
const _: () = assert!(
    DISOWNED_MS > UNCONFIRMED_MS + LOST_AFTER_MS + 2 * REPEAT_MS,
    "who was told of a forged commit last has forgotten it before it is taken again"
);
const _: () = assert!(
    EMPTY_JOB_MIN_MS > 2 * ATTACHED_EVERY_MS,
    "a job is heard of before it is forgotten"
);
const _: () = assert!(
    PROPOSE_MAX_MS > 2 * REPEAT_MS,
    "a proposal outlives a repeat"
);
const _: () = assert!(
    PROMISE_MAX_MS > 2 * REPEAT_MS,
    "a promise is asked for again before it is done without"
);
const _: () = assert!(
    QUERY_MAX_MS <= storaged_wire::verdict::VERDICT_MIN_MS as u64,
    "peers can answer before a verdict is given"
);
const _: () = assert!(
    QUERY_MAX_MS < JOIN_GRACE_MS,
    "a query ends before the grace"
);
const _: () = assert!(
    PART_FILLED_MAX_MS > SESSION_RETRY_MS + PROPOSE_MAX_MS,
    "a broken-off repair outlives the next attempt"
);
const _: () = assert!(
    REPLAN_GAIN_MS_MIN > SESSION_RETRY_MS + REPEAT_MS,
    "another plan pays for its attempt"
);
const _: () = assert!(
    EVIDENCE_MS_MIN < REPEAT_MS && REPEAT_MS < PACE_STRETCH_MS,
    "a stretch has room for a report"
);
const _: () = assert!(
    PROPOSE_MAX_MS < SESSION_STALL_MAX_MS,
    "a proposal is the start of a session"
);
const _: () = assert!(
    NO_ROOM_HEARD_MS > NO_ROOM_TOLD_EVERY_MS + (SESSION_RETRY_MS << NO_ROOM_RETRY_DOUBLINGS),
    "what has no room is asked for again, and the answer told, while that is news"
);
const _: () = assert!(
    HELD_OFF_MS > (SESSION_RETRY_MS << NO_ROOM_RETRY_DOUBLINGS) + PROPOSE_MAX_MS,
    "what parity made way for asks again before it comes back"
);
