// Pando gives Linux hosts instant, disposable, copy-on-write volumes.
package main

import (
	"log/slog"
	"os"

	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/front/cli"
	"pando/internal/front/rest"
	"pando/internal/service/users"
)

// version is set when building: -ldflags "-X main.version=...".
var version = "dev"

var drivers = engine.Drivers{
	reflink.Name: reflink.Open,
	btrfs.Name:   btrfs.Open,
	plain.Name:   plain.Open,
	zfs.Name:     zfs.Open,
}

// newService makes the HTTP interface of the service.
func newService(u *users.Users, log *slog.Logger) cli.Service { return rest.New(u, log) }

func main() { os.Exit(cli.Main(drivers, newService, version)) }
