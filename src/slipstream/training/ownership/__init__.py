"""Says whose an output folder is: the files that runs have listed as theirs, and the one run that is going on in it."""

from slipstream.training.ownership.folder_lock import FolderLock
from slipstream.training.ownership.folder_owner import FOLDER, work_folder
from slipstream.training.ownership.listed_files import ListedFiles
