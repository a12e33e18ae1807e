"""Everything is saved and everything is put back, on one rank or on several."""

import bench

if __name__ == "__main__":
    bench.run()
