package engine

import (
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/tree/treecopy"
)

// lossMessages describes what a volume cannot store of a source: one line per kind, with
// a count and an example.
func lossMessages(all []treecopy.NotKept) []errs.Message {
	var out []errs.Message
	for _, n := range all {
		out = append(out, errs.Messagef("%s, for example %s", lossWords(n), n.Example))
	}
	return out
}

func lossWords(n treecopy.NotKept) string {
	files, have, their, are := countOf(n.Count, "file", "files"), "have", "theirs", "are"
	if n.Count == 1 {
		have, their, are = "has", "its own", "is"
	}

	switch n.What {
	case treecopy.LostSymlinks:
		if n.Count == 1 {
			return "1 symbolic link was skipped, as its target is too long for the volume's filesystem"
		}
		return fmt.Sprintf("%d symbolic links were skipped, as their targets are too long for the volume's filesystem",
			n.Count)
	case treecopy.LostDevices:
		if n.Count == 1 {
			return "1 device node was skipped, as its number is too large for the volume's filesystem"
		}
		return fmt.Sprintf("%d device nodes were skipped, as their numbers are too large for the volume's filesystem",
			n.Count)
	case treecopy.LostDates:
		return fmt.Sprintf("%s %s a different date than in the source, as the volume's filesystem cannot store %s",
			files, have, their)
	case treecopy.LostProject:
		return fmt.Sprintf("%s lost the project ID, which the volume's filesystem cannot store", files)
	case treecopy.LostEncrypted:
		return fmt.Sprintf("%s %s encrypted in the source, but not in the volume", files, are)
	case treecopy.LostVerity:
		return fmt.Sprintf("%s lost the protection of fs-verity", files)
	case treecopy.LostCasefold:
		return fmt.Sprintf("%s lost the flag casefold: names in the volume are case-sensitive", files)
	case treecopy.LostRootFlags:
		return "the root directory is not immutable or append-only in the volume, as it will be a mount point"
	case treecopy.LostOtherFlags:
		return fmt.Sprintf("%s %s flags in the archive that Linux does not have", files, have)
	}

	return fmt.Sprintf("%s lost the flag %s, which the volume's filesystem cannot store or this process may not set",
		files, n.What)
}

// countOf returns a count with its noun, in the singular or the plural.
func countOf(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
