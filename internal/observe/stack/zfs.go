package stack

import (
	"fmt"
	"path/filepath"
	"strings"

	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
)

// zpool adds the zpool of a dataset, and its devices.
func (b *builder) zpool(dataset string, depth int) {
	pool := zfs.PoolOf(dataset)
	if !b.add(Layer{Kind: Zpool, Name: "zpool " + pool, Depth: depth, Dataset: pool}) {
		return
	}

	devs, err := poolDevices(b, pool)
	if err != nil {
		b.hide("the devices of zpool %s: %v", pool, err)
		return
	}

	for _, d := range devs {
		b.group = d.group
		if d.file != "" {
			b.addPath(d.file, depth+1)
			continue
		}
		x, err := blockdev.LookupPath(d.node)
		if err != nil {
			b.hide("%s of zpool %s: %v", d.node, pool, err)
			continue
		}
		b.addDevice(x, depth+1, d.role)
	}
}

// vdev is a leaf of a zpool.
type vdev struct{ node, file, role, group string }

func poolDevices(b *builder, pool string) ([]vdev, error) {
	out, err := zfs.Tool("zpool").Output(b.ctx, "status", "-P", "-L", pool)
	if err != nil {
		return nil, err
	}
	devs := parseStatus(string(out), pool)
	if len(devs) == 0 {
		return nil, fmt.Errorf("zpool status lists none")
	}
	return devs, nil
}

// parseStatus reads the leaves, whose names are paths, from the table of `zpool status -P -L`. Classes (logs, cache,
// ...) have lines of their own.
func parseStatus(text, pool string) (out []vdev) {
	inside, role, group, margin := false, "", "", 0
	for line := range strings.Lines(text) {
		f := strings.Fields(line)

		// Top-level vdevs are indented by two columns more than the pool and the classes.
		if inside && len(f) > 0 && indent(line) == margin+2 {
			group = f[0]
		}

		switch {
		case len(f) >= 2 && f[0] == "NAME" && f[1] == "STATE":
			inside, margin = true, indent(line)
		case !inside || len(f) == 0:
		case strings.HasPrefix(strings.TrimSpace(line), "errors:"):
			return out
		case f[0] == pool && indent(line) <= margin:
			role = ""
		case !strings.HasPrefix(f[0], "/"):
			switch f[0] {
			case "logs":
				role = "log"
			case "spares":
				role = "spare"
			case "cache", "special", "dedup":
				role = f[0]
			}
		case strings.HasPrefix(f[0], "/dev/"):
			out = append(out, vdev{node: f[0], role: role, group: group})
		default:
			out = append(out, vdev{file: filepath.Clean(f[0]), role: role, group: group})
		}
	}

	return out
}

func indent(line string) int { return len(line) - len(strings.TrimLeft(line, " \t")) }

// zvolDataset finds the dataset of a zvol. The kernel knows it, but tells only root; otherwise links in /dev/zvol show
// it, if udev creates them.
func zvolDataset(d blockdev.Device) (string, error) {
	if name, err := zfs.DatasetOf(d.Path()); err == nil {
		return name, nil
	}

	found := ""
	for dir := "/dev/zvol/*"; strings.Count(dir, "*") < 12 && found == ""; dir += "/*" {
		links, err := filepath.Glob(dir)
		if err != nil || len(links) == 0 {
			break
		}
		for _, l := range links {
			if real, err := filepath.EvalSymlinks(l); err == nil && real == d.Path() {
				found = strings.TrimPrefix(l, "/dev/zvol/")
			}
		}
	}

	if found == "" {
		return "", fmt.Errorf("no link in /dev/zvol points to it")
	}

	return found, nil
}
