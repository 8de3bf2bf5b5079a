//! GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11D), the field of `reed-solomon-erasure` and ISA-L.

/// Product of two field elements, by shift and reduce: the definition that every table follows from.
pub const fn mul(a: u8, b: u8) -> u8 {
    let (mut a, mut b, mut product) = (a as u16, b, 0u16);
    while b > 0 {
        if b & 1 == 1 {
            product ^= a;
        }
        a <<= 1;
        if a & 0x100 != 0 {
            a ^= 0x11D;
        }
        b >>= 1;
    }
    product as u8
}

const fn mul_table() -> [[u8; 256]; 256] {
    // Rows by doubling: c*x for every x, from the eight products with powers of two.
    let mut table = [[0u8; 256]; 256];
    let mut c = 0;
    while c < 256 {
        let mut bit = 0;
        while bit < 8 {
            let high = 1usize << bit;
            let product = mul(c as u8, high as u8);
            let mut x = 0;
            while x < high {
                table[c][high + x] = table[c][x] ^ product;
                x += 1;
            }
            bit += 1;
        }
        c += 1;
    }
    table
}

/// `MUL[c][x]` is c*x.
pub static MUL: [[u8; 256]; 256] = mul_table();

/// The inverse of a non-zero element; 0 for 0.
pub fn inverse(a: u8) -> u8 {
    (1..=255u8)
        .find(|x| MUL[usize::from(a)][usize::from(*x)] == 1)
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_definition() {
        for c in 0..=255u8 {
            for x in 0..=255u8 {
                assert_eq!(MUL[usize::from(c)][usize::from(x)], mul(c, x));
            }
        }
    }

    #[test]
    fn every_non_zero_element_has_an_inverse() {
        assert!((1..=255u8).all(|a| mul(a, inverse(a)) == 1));
    }
}
