package controlplane

import "github.com/lni/dragonboat/v4/raftio"

// listener passes on what the library tells of its groups: who leads, that members changed, that a replica of ours was removed.
type listener struct{ ev events }

var (
	_ raftio.IRaftEventListener   = listener{}
	_ raftio.ISystemEventListener = listener{}
)

// LeaderUpdated passes on who leads which group.
func (l listener) LeaderUpdated(info raftio.LeaderInfo) { l.ev.leader(info.ShardID, info.LeaderID) }

// MembershipChanged passes on that a group has other members.
func (l listener) MembershipChanged(info raftio.NodeInfo) { l.ev.members(info.ShardID) }

// NodeReady passes on that a replica has begun to run: from here on its members can be asked for.
func (l listener) NodeReady(info raftio.NodeInfo) { l.ev.members(info.ShardID) }

// NodeDeleted passes on that a replica of this broker was taken out of its group.
func (l listener) NodeDeleted(info raftio.NodeInfo) { l.ev.deleted(info.ShardID, info.ReplicaID) }

// SnapshotRecovered passes on that a group may have other members: a snapshot brings them without a change.
func (l listener) SnapshotRecovered(info raftio.SnapshotInfo) { l.ev.members(info.ShardID) }

// NodeHostShuttingDown is not of interest, as the ones below.
func (l listener) NodeHostShuttingDown() {}

// NodeUnloaded does nothing.
func (l listener) NodeUnloaded(raftio.NodeInfo) {}

// ConnectionEstablished does nothing.
func (l listener) ConnectionEstablished(raftio.ConnectionInfo) {}

// ConnectionFailed does nothing.
func (l listener) ConnectionFailed(raftio.ConnectionInfo) {}

// SendSnapshotStarted does nothing.
func (l listener) SendSnapshotStarted(raftio.SnapshotInfo) {}

// SendSnapshotCompleted does nothing.
func (l listener) SendSnapshotCompleted(raftio.SnapshotInfo) {}

// SendSnapshotAborted does nothing.
func (l listener) SendSnapshotAborted(raftio.SnapshotInfo) {}

// SnapshotReceived does nothing.
func (l listener) SnapshotReceived(raftio.SnapshotInfo) {}

// SnapshotCreated does nothing.
func (l listener) SnapshotCreated(raftio.SnapshotInfo) {}

// SnapshotCompacted does nothing.
func (l listener) SnapshotCompacted(raftio.SnapshotInfo) {}

// LogCompacted does nothing.
func (l listener) LogCompacted(raftio.EntryInfo) {}

// LogDBCompacted does nothing.
func (l listener) LogDBCompacted(raftio.EntryInfo) {}
