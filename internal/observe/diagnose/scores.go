package diagnose

import "time"

// Scores order the causes: the cause with the highest score is the diagnosis. The score of a measured cause is the
// share of the time of the syncs that it explains, from leastShare to 1. The scores of other causes are below, and each
// says where its cause belongs among measured ones: 0.3 is as much as 30 % of the time. docs/diagnose.md has the same
// table for users.
const (
	// leastShare is the smallest share to report: less is within the noise of sampling.
	leastShare = 0.1

	// scoreLie is above every other score: while syncs do not make data durable, their speed does not matter.
	scoreLie = 10
	// scoreErrors is above every share: a failing device loses data, whatever else is slow.
	scoreErrors = 5

	// scoreRunning is for maintenance, discards and queues whose part in the syncs is unknown, times the share of the
	// time in which they were seen. At most as much as a third of the time, as most of them run in the background.
	scoreRunning = 0.35
	// scoreThrottled is for a throttled writer that does not sync here, times the share of the time that it waited. Less
	// than 1, as the syncs only share its device, so that a writer that does sync here ranks higher.
	scoreThrottled = 0.8
	// scoreThrottledZFS is for ZFS, which counts how often it held writers back, but not for how long: so take half.
	scoreThrottledZFS = 0.5
	// scoreCrowd is low, as many control groups that sync are no fault; times the share of syncs of the busiest group.
	scoreCrowd = 0.3
	// scoreCommits is for the journal, times the share of the time in which it committed: a sync that begins during a
	// commit waits for the rest of it only, on average half.
	scoreCommits = 0.5
	// scoreTxgLeast is for a transaction group that took slowTxg or longer, which stalled syncs at least once.
	scoreTxgLeast = 0.2
	// scoreTxgShare comes on top, times the share of the time in which groups were written: at most 0.8 in all, so that
	// a measured cause of all the time ranks higher.
	scoreTxgShare = 0.6

	// scoreFull is where nearly full filesystems begin, for they are common and often fast enough. It is also the score
	// of ZFS's logbias and of memory limits, which are as common.
	scoreFull = 0.2
	// scoreFullest is that of a filesystem without free space: no better known than half of the time.
	scoreFullest = 0.5
	// scoreMetadata is near scoreFullest: a btrfs without space for metadata stalls, however much is free for data.
	scoreMetadata = 0.4
	// scoreFragments is near scoreFull: on most disks, fragments cost requests rather than seeks.
	scoreFragments = 0.25

	// weightPoolDevices multiplies the share of data disks: with the same share, the log device ranks higher.
	weightPoolDevices = 0.9
	// weightAbove multiplies the share above the devices, which has no name: a cause that names a limit or a CPU explains
	// the same time, and ranks higher.
	weightAbove = 0.6
)

// What counts as slow, in seconds.
const (
	slowSync     = 0.002 // on average, unless the disk rotates
	slowSpinning = 0.020
	slowLayer    = 0.001
	slowCommit   = 0.050
	slowTxg      = time.Second
)

// deepQueue is the mean number of requests in flight above which a request mostly waits for others.
const deepQueue = 4.0
