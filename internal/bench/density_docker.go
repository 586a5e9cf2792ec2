package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	runs "pando/internal/linux/run"
)

// dockerMark in the outer directory of a run says that it may have made containers and an image of its name.
const dockerMark = "docker"

// containers are containers of one image, which holds the tree. Their only process waits; the sessions read through
// its root directory.
type containers struct {
	*density
	ids   []string
	image bool
	devs  *meter
}

func (c *containers) name() string  { return DensityDocker }
func (c *containers) meter() *meter { return c.devs }

func (c *containers) setup(ctx context.Context, n int) (dirs []string, err error) {
	for i := range n {
		out, err := docker(ctx, "run", "--detach", "--network", "none", "--name", c.run.name(itoa(i)),
			"--volume", c.Program+":/pando:ro", c.scratch.name, "/pando", "bench", "wait")
		if err != nil {
			return nil, err
		}
		c.ids = append(c.ids, strings.TrimSpace(out))
	}

	pids, err := docker(ctx, append([]string{"inspect", "--format", "{{.State.Pid}}"}, c.ids...)...)
	if err != nil {
		return nil, err
	}

	for _, pid := range strings.Fields(pids) {
		if pid == "0" {
			return nil, errs.New(errs.Internal, "bench", "docker", "a container ended by itself")
		}
		dirs = append(dirs, filepath.Join("/proc", pid, "root/tree"))
	}

	return dirs, nil
}

// prepare imports the source into docker. Unsupported: there is no docker, or its daemon cannot be reached.
func (c *containers) prepare(ctx context.Context) error {
	if c.image {
		return nil
	}

	root, err := docker(ctx, "info", "--format", "{{.DockerRootDir}}")
	if err != nil {
		return errs.New(errs.Unsupported, "bench", "docker", "%w", err)
	}

	c.devs = newMeter(ctx, c.Tail, strings.TrimSpace(root))
	if err := os.WriteFile(filepath.Join(c.scratch.outer, dockerMark), nil, 0o600); err != nil {
		return errs.Wrap("bench", c.scratch.outer, err)
	}

	if err := runs.Pipe(ctx, []string{"tar", "-C", c.source, "--transform", "s,^\\.,tree,S", "-c", "."},
		[]string{"docker", "import", "-", c.scratch.name}, nil); err != nil {
		return err
	}

	c.image = true
	return nil
}

func (c *containers) remove(ctx context.Context) error {
	if len(c.ids) == 0 {
		return nil
	}
	_, err := docker(ctx, append([]string{"rm", "--force", "--volumes"}, c.ids...)...)
	c.ids = nil
	return err
}

// removeContainers removes the containers and the image of a run, if it may have made some.
func (s *scratch) removeContainers(ctx context.Context) error {
	if _, err := os.Lstat(filepath.Join(s.outer, dockerMark)); errors.Is(err, os.ErrNotExist) {
		return nil
	}

	ids, err := docker(ctx, "ps", "--all", "--quiet", "--filter", "name=^"+s.name+"-")
	if err == nil && ids != "" {
		_, err = docker(ctx, append([]string{"rm", "--force"}, strings.Fields(ids)...)...)
	}
	if err != nil {
		return err
	}

	images, err := docker(ctx, "images", "--quiet", s.name)
	if err == nil && images != "" {
		_, err = docker(ctx, "rmi", s.name)
	}
	return err
}

func docker(ctx context.Context, args ...string) (string, error) {
	out, err := runs.Program(ctx, "docker", args...)
	return string(out), err
}
