CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE goldens (
  name TEXT PRIMARY KEY,
  current INTEGER NOT NULL,      -- generation that clones are made from
  next INTEGER NOT NULL,         -- number of the next generation: numbers are not reused
  created_at INTEGER NOT NULL,   -- nanoseconds since 1970
  keep INTEGER NOT NULL DEFAULT 0, -- newest generations that a publish leaves, 0: all
  overlay TEXT NOT NULL DEFAULT '', -- whether clones are overlays: never, default, '' if the user decides
  source TEXT NOT NULL DEFAULT '', -- what a refresh makes new generations from, as JSON
  labels TEXT NOT NULL DEFAULT '' -- as JSON, '' if there are none
) WITHOUT ROWID;
CREATE TABLE objects (
  id TEXT PRIMARY KEY,
  kind TEXT NOT NULL,            -- volume, snapshot, generation, layer
  name TEXT NOT NULL,            -- of a volume, or of a snapshot within its volume
  golden TEXT NOT NULL,
  generation INTEGER NOT NULL,
  volume TEXT NOT NULL,          -- of a snapshot: lineage of its volume; of a volume: its lineage, '' if that is its id
  fs TEXT NOT NULL,
  size INTEGER NOT NULL,         -- bytes of the block device, 0 for native
  sector INTEGER NOT NULL,
  origin TEXT NOT NULL,          -- reference
  origin_id TEXT NOT NULL,
  created_at INTEGER NOT NULL,   -- nanoseconds since 1970, as all times here
  expires_at INTEGER NOT NULL,   -- 0: never
  ephemeral INTEGER NOT NULL,
  boot TEXT NOT NULL,
  used_at INTEGER NOT NULL,
  logical INTEGER NOT NULL,      -- bytes when last measured
  exclusive INTEGER NOT NULL,
  shared INTEGER NOT NULL,
  extents INTEGER NOT NULL,
  measured_at INTEGER NOT NULL,  -- 0: never
  pinned INTEGER NOT NULL DEFAULT 0, -- not to be destroyed before
  consistency TEXT NOT NULL DEFAULT '', -- of a snapshot: clean, crash
  lower TEXT NOT NULL DEFAULT '', -- of an overlay: the object whose files it changes
  mirror INTEGER NOT NULL DEFAULT 0, -- of a generation: 1: made from the source of its golden
  labels TEXT NOT NULL DEFAULT '' -- of a volume or snapshot, as JSON, '' if there are none
) WITHOUT ROWID;
CREATE UNIQUE INDEX volume_name ON objects(name) WHERE kind = 'volume';
CREATE UNIQUE INDEX generation_number ON objects(golden, generation) WHERE kind = 'generation';
CREATE UNIQUE INDEX snapshot_name ON objects(volume, name) WHERE kind = 'snapshot';
CREATE INDEX lineage ON objects(volume) WHERE volume <> '';
CREATE INDEX expiry ON objects(expires_at) WHERE expires_at > 0;
CREATE INDEX lower_layer ON objects(lower) WHERE lower <> '';
CREATE INDEX layer_name ON objects(name) WHERE kind = 'layer';
CREATE TABLE attachments (
  id TEXT PRIMARY KEY,           -- object
  mountpoint TEXT NOT NULL,
  loop INTEGER NOT NULL,         -- number of the loop device, -1: none
  mount_id INTEGER NOT NULL,     -- of the mount, 0: it is a symbolic link
  dev INTEGER NOT NULL,          -- of the image file behind the loop device
  ino INTEGER NOT NULL,
  mount_ns INTEGER NOT NULL,
  made_dir INTEGER NOT NULL,     -- 1: the mount point goes with the attachment
  boot TEXT NOT NULL,
  at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE tombstones (
  id TEXT PRIMARY KEY,           -- object whose destruction was decided
  ref TEXT NOT NULL,
  bytes INTEGER NOT NULL,        -- exclusive bytes when last measured
  at INTEGER NOT NULL,
  reclaimed INTEGER NOT NULL     -- 1: the driver has removed it; kept until that is durable
) WITHOUT ROWID;
CREATE INDEX unreclaimed ON tombstones(reclaimed) WHERE reclaimed = 0;
CREATE TABLE marks (
  id TEXT PRIMARY KEY,           -- object that is worked on
  op TEXT NOT NULL,
  name TEXT NOT NULL,            -- the name that it will have, '' if it keeps its own
  reads TEXT NOT NULL,           -- object that it is made from
  mountpoint TEXT NOT NULL,      -- that it is being mounted at
  made_dir INTEGER NOT NULL,     -- 1: the directory is made for it
  freezes INTEGER NOT NULL DEFAULT 0, -- 1: the filesystem in what it reads may be frozen
  owner TEXT NOT NULL,           -- file in live/ that the operation holds locked
  pid INTEGER NOT NULL,
  start INTEGER NOT NULL,        -- of the process, clock ticks since boot
  boot TEXT NOT NULL,
  at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX mark_name ON marks(name) WHERE name <> '';
CREATE TABLE remote_points (
  repo TEXT NOT NULL,            -- ID of a repository
  manifest TEXT NOT NULL,        -- ID of a manifest in it
  object TEXT NOT NULL,          -- object with the content that it describes; the row goes with it
  at INTEGER NOT NULL,
  PRIMARY KEY (repo, manifest, object)
) WITHOUT ROWID;
CREATE INDEX remote_object ON remote_points(object);
CREATE TABLE remote_heads (
  repo TEXT NOT NULL,
  name TEXT NOT NULL,            -- of the head: a volume or golden in the repository
  lineage TEXT NOT NULL,         -- of what it is here, '' if the head was only seen
  epoch INTEGER NOT NULL,        -- the highest that was seen in the head
  manifest TEXT NOT NULL,        -- that was last pushed or pulled, '' if the head was only seen
  at INTEGER NOT NULL,
  next INTEGER NOT NULL DEFAULT 0, -- the highest number of a next point that was seen with that epoch, 0: not known
  PRIMARY KEY (repo, name)
) WITHOUT ROWID;
