package progress

// Stage is what a long operation does at the moment. Front ends show it in their words, or in those of [Stage.String].
type Stage uint8

// The stages, in order of their names. None: nothing has begun.
const (
	None Stage = iota
	ApplyingChanges
	CheckingCatalogue
	CheckingFilesystem
	CheckingFilesystems
	CheckingFor // names the kind of problem that is looked for
	CheckingOut // names the revision
	CleaningUp
	Cloning
	Comparing
	ComparingExtents
	ComparingTrees
	ComparingVolumes
	ComparingWithCatalogue
	Copying
	CopyingAgain // names what has changed since it was copied
	Counting
	CreatingFiles
	Deleting
	Destroying
	Exporting
	Fetching
	FindingAffectedPoints
	FindingChanges
	FindingGoldenChanges
	FindingLayers // names the path whose storage is examined
	FindingVolumeChanges
	Git // names the phase of a git command, in the words of git
	ListingDirectories
	ListingObjects
	Measuring // names what is measured, and counts seconds
	Preparing // names the command that prepares a golden
	Pruning
	Pulling // names the point that is pulled
	Pushing // names the point that is pushed
	ReadingData
	ReadingManifests
	ReadingMaps
	ReadingPointLists
	ReadingRemote
	ReapplyingChanges
	Repacking
	Repairing // names the damaged object
	Replacing // names the directory that becomes a volume
	Resizing
	Rewinding
	RunningBenchmark // names the step of a benchmark, in words
	Sealing
	Snapshotting
	Unpacking
	WaitingForBuild // names the golden that another process builds
	Watching        // names the path that is watched, and counts seconds
	WritingIdentities
	WritingToDisk
)

// Unit is what a stage counts as "files".
type Unit string

// The units. Things: they have no name.
const (
	Things  Unit = ""
	Files   Unit = "files"
	Seconds Unit = "s"
	Volumes Unit = "volumes"
)

// stages describes each stage.
var stages = [...]struct {
	words string // what happens, in English, such as "pushing", before the name of what it happens to
	unit  Unit
}{
	None:                   {"", Files},
	ApplyingChanges:        {"applying the changes", Things},
	CheckingCatalogue:      {"checking the catalogue", Things},
	CheckingFilesystem:     {"checking the filesystem", Things},
	CheckingFilesystems:    {"checking filesystems", Volumes},
	CheckingFor:            {"checking for", Things},
	CheckingOut:            {"checking out", Files},
	CleaningUp:             {"cleaning up", Things},
	Cloning:                {"cloning", Volumes},
	Comparing:              {"comparing", Files},
	ComparingExtents:       {"comparing extents", Volumes},
	ComparingTrees:         {"comparing trees", Files},
	ComparingVolumes:       {"comparing volumes", Things},
	ComparingWithCatalogue: {"comparing the pool with the catalogue", Things},
	Copying:                {"copying", Files},
	CopyingAgain:           {"copying again", Files},
	Counting:               {"counting", Files},
	CreatingFiles:          {"creating files", Files},
	Deleting:               {"deleting", Things},
	Destroying:             {"destroying", Things},
	Exporting:              {"exporting", Files},
	Fetching:               {"fetching", Things},
	FindingAffectedPoints:  {"finding affected points", Things},
	FindingChanges:         {"finding the changes", Files},
	FindingGoldenChanges:   {"finding the golden's changes", Files},
	FindingLayers:          {"finding the layers below", Things},
	FindingVolumeChanges:   {"finding the volume's changes", Files},
	Git:                    {"git:", Things},
	ListingDirectories:     {"listing directories", Things},
	ListingObjects:         {"listing objects", Things},
	Measuring:              {"measuring", Seconds},
	Preparing:              {"preparing:", Things},
	Pruning:                {"pruning", Things},
	Pulling:                {"pulling", Things},
	Pushing:                {"pushing", Things},
	ReadingData:            {"reading data", Things},
	ReadingManifests:       {"reading manifests", Things},
	ReadingMaps:            {"reading maps", Things},
	ReadingPointLists:      {"reading lists of points", Things},
	ReadingRemote:          {"reading the remote", Things},
	ReapplyingChanges:      {"reapplying the volume's changes", Things},
	Repacking:              {"repacking", Things},
	Repairing:              {"repairing", Things},
	Replacing:              {"replacing", Things},
	Resizing:               {"resizing", Things},
	Rewinding:              {"rewinding", Things},
	RunningBenchmark:       {"benchmark:", Things},
	Sealing:                {"sealing", Things},
	Snapshotting:           {"snapshotting", Things},
	Unpacking:              {"unpacking", Files},
	WaitingForBuild:        {"waiting for another process to build", Things},
	Watching:               {"watching", Seconds},
	WritingIdentities:      {"writing identities", Things},
	WritingToDisk:          {"writing to disk", Things},
}

// String returns the stage in English: "pushing".
func (s Stage) String() string { return stages[s].words }

// Unit returns what the stage counts as files.
func (s Stage) Unit() Unit { return stages[s].unit }
