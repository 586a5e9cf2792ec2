package treediff

// IsNew reports whether a change makes a file where there is none, or none any more.
func (ch *Change) IsNew() bool { return ch.isNew() }

// Replaces reports whether something else, with the same path, goes before, and of which type that is.
func (ch *Change) Replaces() (Type, bool) {
	if ch.TypeBefore != "" {
		return ch.TypeBefore, true
	}
	return ch.Type, ch.replaced
}

// MakesName reports whether a change makes the path one more name of the file at Link. Another name that the path may
// be by then, of no regular file, goes before.
func (ch *Change) MakesName() bool { return ch.newName() || ch.relinked() }

// Ranges are those of the second tree's file that ChangedBytes counts. False: they are too many, or not known.
func (ch *Change) Ranges() ([]Range, bool) {
	return ch.ranges, ch.ranges != nil || ch.ChangedBytes == 0
}
