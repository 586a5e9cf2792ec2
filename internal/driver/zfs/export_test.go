package zfs

import (
	"bytes"

	"pando/internal/driver"
)

// OnStep calls fn before each program that changes something.
func OnStep(d driver.Driver, fn func(args []string)) { d.(*Driver).step = fn }

// Estimate and SavedBytes understand what programs say.
var (
	Estimate   = estimate
	SavedBytes = savedBytes
)

// Frames is a whole stream with these contents.
func (d *Driver) Frames(content []byte) ([]byte, error) {
	var b bytes.Buffer
	f := &framer{w: &b}
	err := f.begin()
	if err == nil {
		_, err = f.Write(content)
	}
	if err == nil {
		err = f.end()
	}
	return b.Bytes(), err
}
