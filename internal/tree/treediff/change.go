package treediff

// IsNew reports whether a change creates a new file, possibly in place of another.
func (ch *Change) IsNew() bool { return ch.isNew() }

// Replaces reports whether a change first removes another file at the path, and the type of that file.
func (ch *Change) Replaces() (Type, bool) {
	if ch.TypeBefore != "" {
		return ch.TypeBefore, true
	}
	return ch.Type, ch.replaced
}

// MakesName reports whether a change makes the path another name of the file at Link. If the path is a name of
// another file that is not regular, that name is removed first.
func (ch *Change) MakesName() bool { return ch.newName() || ch.relinked() }

// Ranges returns the ranges of the second tree's file that ChangedBytes counts. False: there are too many, or they are
// unknown.
func (ch *Change) Ranges() ([]Range, bool) {
	return ch.ranges, ch.ranges != nil || ch.ChangedBytes == 0
}
