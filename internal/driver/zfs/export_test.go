package zfs

import "pando/internal/driver"

// OnStep calls fn before each program that changes something.
func OnStep(d driver.Driver, fn func(args []string)) { d.(*Driver).step = fn }
