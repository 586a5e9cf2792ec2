// Pando gives Linux hosts instant, disposable, copy-on-write volumes.
package main

import (
	"os"

	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/front/cli"
)

// version is set when building: -ldflags "-X main.version=...".
var version = "dev"

var drivers = engine.Drivers{
	reflink.Name: reflink.Open,
	btrfs.Name:   btrfs.Open,
	plain.Name:   plain.Open,
	zfs.Name:     zfs.Open,
}

func main() { os.Exit(cli.Main(drivers, version)) }
