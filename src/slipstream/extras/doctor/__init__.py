"""Finds this machine's abilities, and problems that would keep any training from running here."""

from slipstream.extras.doctor.examination import Examination, examine
from slipstream.extras.doctor.finding import Finding
