package engine

import (
	"context"
	"io"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
)

// SnapshotHooks are shell commands that run around the taking of snapshots, for example to write a checkpoint. Nothing
// is locked or frozen while they run.
type SnapshotHooks struct {
	// Before runs before anything is changed; "": nothing does. If it fails, or ctx ends, nothing is done, and After does
	// not run.
	Before string

	// After runs once Before has succeeded, and the snapshots exist or could not be made, even if ctx has ended.
	After string

	Env    []string  // of the commands, in addition to PANDO_VOLUMES, PANDO_SNAPSHOT and PANDO_RESULT (of After)
	Output io.Writer // of the commands
}

// runBefore runs the command before the snapshots. IO, Canceled.
func (s *snapshots) runBefore(ctx context.Context) error {
	if s.hooks.Before == "" {
		return nil
	}

	err := s.runHook(ctx, s.hooks.Before)
	if err == nil || errs.Is(err, errs.Canceled) {
		return err
	}

	return errs.New(errs.IO, opSnapshot, s.volumeNames(", "), "the command to run before the snapshot failed: %w", err).
		WithHint("no snapshot was taken; fix the command of %s", errs.Param("before"))
}

// runAfter runs the command after the snapshots; failed says why they were not taken. IO.
func (s *snapshots) runAfter(ctx context.Context, failed error) error {
	if s.hooks.After == "" {
		return nil
	}

	result, state := "taken", "the snapshot was taken and stays"
	if len(s.volumes) > 1 {
		state = "the snapshots were taken and stay"
	}
	if failed != nil {
		result, state = "failed", "no snapshot was taken"
	}

	err := s.runHook(ctx, s.hooks.After, "PANDO_RESULT="+result)
	if err == nil {
		return nil
	}

	return errs.New(errs.IO, opSnapshot, s.volumeNames(", "), "the command to run after the snapshot failed: %w", err).
		WithHint(state+"; run what the command of %s does yourself", errs.Param("after"))
}

func (s *snapshots) runHook(ctx context.Context, command string, env ...string) error {
	env = append(slices.Clone(s.hooks.Env), append(env,
		"PANDO_VOLUMES="+s.volumeNames(" "), "PANDO_SNAPSHOT="+s.name.String())...)
	return run.Shell(ctx, command, env, s.hooks.Output)
}

func (s *snapshots) volumeNames(separator string) string {
	names := make([]string, len(s.volumes))
	for i, v := range s.volumes {
		names[i] = v.String()
	}
	return strings.Join(names, separator)
}
