"""`slipstream doctor`: what this machine can do, what isn't here, and what would keep a training from running."""

from slipstream.cli.doctor.doctor_command import doctor
